"""Results have the strides of one device, and every local shard lies in memory as the global tensor does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.sharding.memory_order import (
    contiguous_meta,
    has_memory_order_of,
    in_memory_order,
    memory_order,
    overlaps,
)
from shardwise.sharding.spec import TensorMeta
from shardwise.testing import assemble, make_dtensor
from shardwise.testing.values import check_strides
from shardwise.world import RankTensor
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2),
    "turned": lambda x: x.movedim(0, -1),
    "channels last": lambda x: x.movedim(-1, 1) if x.dim() > 2 else x.t(),
    "sliced": lambda x: x[..., 1:],
    "every other": lambda x: x[::2].transpose(-1, -2),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "new dim": lambda x: x.unsqueeze(1).expand(x.shape[0], 3, *x.shape[1:]).transpose(0, 1),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1,
    "add to itself": lambda x: x + x[:1],
    "power": lambda x: 2.0**x,
    "logaddexp": lambda x: torch.logaddexp(x[:1], x),
    "copysign": lambda x: torch.copysign(x[..., :1], x),
    "logsigmoid": F.logsigmoid,
    "where": lambda x: torch.where(x > 0, x, -x),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "double": lambda x: x.double(),
    "sum": lambda x: x.sum(0),
    "sum, dim kept": lambda x: x.sum(-1, keepdim=True) + x,
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "linear": lambda x: F.linear(x, x.reshape(-1, x.shape[-1])[:3]),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "cat": lambda x: torch.cat([x, x], 1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0).values,
    "tril": lambda x: x.tril(),
    "pad": lambda x: F.pad(x, (1, 1)),
    "rows": lambda x: x[1:3],
    "unfold": lambda x: x.unfold(0, 2, 1),
    "one_hot": lambda x: (x > 0).long(),
    "empty_like": lambda x: torch.zeros_like(x),
}
WORLDS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((2,), [Partial()]),
    ((2, 2), [Shard(0), Shard(1)]),
]


def strides(tensor: Tensor) -> list[int]:
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_results(layout: str, function: str) -> None:
    value = torch.arange(72.0).reshape(4, 6, 3) / 7 - 2
    wanted = FUNCTIONS[function](LAYOUTS[layout](value))
    for sizes, placements in WORLDS:
        with mesh_of(*sizes) as mesh:
            found = FUNCTIONS[function](LAYOUTS[layout](make_dtensor(value, mesh, placements, seed=0)))
            assert strides(found) == strides(wanted)
            torch.testing.assert_close(assemble(found), wanted, rtol=1e-5, atol=1e-5)


IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "conv2d": lambda x: F.conv2d(x, weight(x, (5, 3, 3, 3)), padding=1),
    "conv1d": lambda x: F.conv1d(x.flatten(2), weight(x, (5, 3, 3))),
    "conv1d of rows": lambda x: F.conv1d(
        x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2), weight(x, (5, 3, 3))
    ),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "reflection pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "relu": F.relu,
    "to channels last": lambda x: (x + 1).to(memory_format=torch.channels_last),
    "group_norm": lambda x: F.group_norm(x, 1),
}


def weight(like: Tensor, shape: Sequence[int]) -> Tensor:
    value = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("placement", [Shard(0), Shard(2), Partial()], ids=str)
def test_strides_of_images(name: str, placement: Placement) -> None:
    value = torch.linspace(-3, 3, 4 * 6 * 6 * 3).reshape(4, 6, 6, 3)
    for order in ((0, 3, 1, 2), (0, 3, 2, 1), (3, 0, 1, 2)):
        image = value.permute(order)
        if image.shape[1] != 3:
            image = image.transpose(0, 1)
        wanted = IMAGES[name](image)
        with mesh_of(2) as mesh:
            whole = make_dtensor(value, mesh, [placement], seed=0).permute(order)
            found = IMAGES[name](whole if whole.shape[1] == 3 else whole.transpose(0, 1))
            assert strides(found) == strides(wanted)
            torch.testing.assert_close(assemble(found), wanted, rtol=1e-4, atol=1e-4)


SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "given statistics": lambda x: F.batch_norm(x, weight(x, x.shape[1:2]), weight(x, x.shape[1:2]).square() + 1),
    "reflection pad": lambda x: F.pad(x, (0, 0, 0, 0), mode="reflect"),
    "replication pad": lambda x: F.pad(x, (1, 0, 0, 1), mode="replicate"),
    "columns": lambda x: F.unfold(x, 1),
    "conv2d": lambda x: F.conv2d(x, weight(x, (2, x.shape[1], 1, 1))),
    "conv1d": lambda x: F.conv1d(x[0], weight(x, (2, x.shape[2], 1))),
    "max_pool2d": lambda x: F.max_pool2d(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 1, 2, 2)], ids=str)
def test_strides_of_images_with_dims_of_one_index(name: str, shape: Sequence[int]) -> None:
    """The stride of one index means nothing, but PyTorch looks at it in some places, and not in others."""
    value = torch.linspace(-3, 3, torch.Size(shape).numel()).reshape(shape)

    def results(x: Tensor) -> tuple[Tensor, Tensor]:
        result = SMALL[name](x)
        return result, torch.autograd.grad(result.sum(), x)[0]

    with mesh_of(2) as mesh:
        whole = distribute_tensor(value, mesh, [Replicate()])
        for order in permutations(range(4)):
            wanted = results(value.permute(order).requires_grad_())
            found = results(whole.permute(order).requires_grad_())
            assert list(map(strides, found)) == list(map(strides, wanted))


@pytest.mark.parametrize("orders", [((1, 0), (1, 0)), ((1, 0), (0, 1)), ((0, 1), (1, 0))], ids=str)
@pytest.mark.parametrize("shapes", [((1, 2, 1, 1), (2, 1)), ((1, 3, 1), (2, 1)), ((1, 2, 1), (3, 1))], ids=str)
def test_strides_of_operands_that_are_broadcast_to_each_other(
    shapes: tuple[Sequence[int], Sequence[int]], orders: tuple[Sequence[int], Sequence[int]]
) -> None:
    def results(x: Tensor, y: Tensor) -> list[Sequence[int]]:
        x, y = x.movedim((0, 1), orders[0]), y.movedim((0, 1), orders[1])
        made = x + y, torch.where(x > 0, x, y), torch.addcmul(y, x, y), x.to(torch.int32) + y
        return [result.stride() for result in made]

    values = [torch.linspace(-3, 3, torch.Size(shape).numel()).reshape(shape) for shape in shapes]
    with mesh_of(2) as mesh:
        assert results(*(distribute_tensor(v, mesh, [Replicate()]) for v in values)) == results(*values)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_attention_on_normalized_heads(placement: Placement) -> None:
    """The heads of a projection, normalized one by one: today's models do so with queries and keys."""

    def attend(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        q = F.rms_norm(x.view(2, 6, 4, 8).transpose(1, 2), (8,), scale)
        result = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
        joined = result.reshape(2, 6, 32)
        joined.square().sum().backward()
        return q, joined, x.grad, scale.grad

    value, scale = torch.linspace(-2, 2, 2 * 6 * 32).reshape(2, 6, 32), torch.linspace(0.5, 1.5, 8)
    wanted = attend(value.clone().requires_grad_(), scale.clone().requires_grad_())
    with mesh_of(2) as mesh:
        x = make_dtensor(value, mesh, [placement], seed=0).requires_grad_()
        found = attend(x, distribute_tensor(scale, mesh, [Replicate()]).requires_grad_())
        for have, want in zip(found, wanted, strict=True):
            assert isinstance(have, DTensor)
            assert strides(have) == strides(want)
            torch.testing.assert_close(assemble(have.detach()), want.detach(), rtol=1e-4, atol=1e-5)


@on_processes
def test_shards_of_processes_lie_as_specs_say() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    rank = torch.distributed.get_rank()
    value = torch.arange(72.0).reshape(4, 6, 3) / 7 - 2
    for layout in LAYOUTS.values():
        for function in FUNCTIONS.values():
            wanted = function(layout(value))
            found: Any = function(layout(make_dtensor(value, mesh, [Shard(0), Shard(1)], seed=0)))
            assert strides(found) == strides(wanted)
            check_strides(found._local_tensor, found._spec, rank)


# ---- random numbers follow memory -----------------------------------------------------------------------------------

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t() * 1,
    "logaddexp": lambda x: torch.logaddexp(x[:1].t() * 1, x.t()),
    "rms_norm": lambda x: F.rms_norm(x.t(), (6,)),
    "rows": lambda x: (x * 1).t()[1:3],
    "expanded": lambda x: x[:, :1].expand(6, 4) * 1,
}


@pytest.mark.parametrize("name", MADE)
def test_dropout_in_place(name: str) -> None:
    def program(x: Tensor, slope: Tensor) -> list[Tensor]:
        torch.manual_seed(5)
        dropped = F.dropout(MADE[name](x), 0.5, inplace=True)
        result = F.prelu(dropped, slope)
        result.square().sum().backward()
        return [dropped, result, x.grad, slope.grad]  # type: ignore[list-item]

    value, slope = torch.linspace(-3, 3, 24).reshape(6, 4), torch.tensor([0.25])
    wanted = program(value.clone().requires_grad_(), slope.clone().requires_grad_())
    for sizes, placements in WORLDS:
        with mesh_of(*sizes) as mesh:
            x = make_dtensor(value, mesh, placements, seed=0).requires_grad_()
            found = program(x, distribute_tensor(slope, mesh, [Replicate()] * len(sizes)).requires_grad_())
            for have, want in zip(found, wanted, strict=True):
                assert isinstance(have, DTensor)
                assert strides(have) == strides(want)
                torch.testing.assert_close(assemble(have.detach()), want.detach())


# ---- what "lies as" means -------------------------------------------------------------------------------------------


def meta(shape: Sequence[int], stride: Sequence[int]) -> TensorMeta:
    return TensorMeta(torch.Size(shape), tuple(stride), torch.float32)


@pytest.mark.parametrize(
    ("local", "spec", "lies"),
    [
        (((2, 4), (4, 1)), ((8, 4), (4, 1)), True),
        (((8, 2), (2, 1)), ((8, 4), (4, 1)), True),
        (((8, 2), (4, 1)), ((8, 4), (4, 1)), False),  # a gap that the global tensor does not have
        (((8, 2), (4, 1)), ((8, 4), (6, 1)), True),
        (((8, 2), (1, 8)), ((8, 4), (4, 1)), False),  # the other order
        (((8, 2), (1, 8)), ((8, 4), (1, 8)), True),
        (((1, 4), (99, 1)), ((8, 4), (4, 1)), True),  # the stride of one row means nothing
        (((0, 4), (7, 7)), ((8, 4), (4, 1)), True),
        (((8, 4), (0, 1)), ((8, 4), (4, 1)), False),  # expanded
        (((8, 4), (4, 1)), ((8, 4), (0, 1)), False),
        (((5, 1, 3), (6, 6, 1)), ((5, 5, 3), (30, 6, 1)), True),
        (((5, 3, 2, 3), (15, 1, 6, 3)), ((5, 5, 2, 3), (25, 1, 10, 5)), True),  # windows
        (((2, 1, 2), (3, 3, 2)), ((2, 2, 2), (6, 3, 2)), True),  # windows with gaps, in which another dim lies
    ],
)
def test_has_memory_order_of(local: Any, spec: Any, lies: bool) -> None:
    shard = torch.empty(1).as_strided((0,), (1,)) if 0 in local[0] else torch.empty_strided(*local)
    assert has_memory_order_of(shard, meta(*spec)) is lies


def test_memory_order() -> None:
    assert memory_order(contiguous_meta((2, 3), torch.float32)) is None
    for shape, stride in (((2, 3), (1, 2)), ((2, 3, 4), (4, 0, 1)), ((2, 3, 4), (0, 4, 1)), ((2, 1, 3), (1, 9, 2))):
        wanted = meta(shape, stride)
        source = torch.arange(24.0)[: torch.Size(shape).numel()].as_strided(shape, stride)
        found = in_memory_order(source.contiguous(), memory_order(wanted))
        assert torch.equal(found, source)
        assert has_memory_order_of(found, wanted)
    found_overlaps = [overlaps(meta(*each)) for each in (((2, 3), (0, 1)), ((3, 3), (1, 1)), ((2, 3), (7, 2)))]
    assert found_overlaps == [True, True, False]


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("placement", [Shard(0), Shard(2), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last", "sliced", "expanded"])
def test_distributing_keeps_the_strides_of_a_tensor_without_gaps(
    layout: str, placement: Placement, source: int | None
) -> None:
    value = LAYOUTS[layout](torch.randn(3, 5, 9))
    expected = torch.empty_like(value, memory_format=torch.contiguous_format) if layout in OTHER else value
    with mesh_of(4) as mesh:
        x = distribute_tensor(value, mesh, [placement], src_data_rank=source).requires_grad_()
        assert x.stride() == expected.stride()
        assert all(has_memory_order_of(shard, x._spec.tensor_meta) for shard in x._local_tensor.shards)
        torch.testing.assert_close(assemble(x), value)
        (x * 2).sum().backward()
        assert x.grad.stride() == x.stride()


OTHER = ("sliced", "expanded")


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(2), Replicate()), (Partial(), Shard(3))], ids=str)
def test_the_global_tensor_keeps_the_order_of_its_dims(placements: tuple[Placement, ...]) -> None:
    value = torch.randn(4, 4, 2, 6).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(4, 4, 2, 6)
    with mesh_of(2, 2) as mesh:
        x = distribute_tensor(value, mesh, placements).requires_grad_()
        found = x.full_tensor()
        assert found.stride() == value.stride()
        assert isinstance(found, RankTensor)
        torch.testing.assert_close(found.shards[3].detach(), value)
        (found * weight).sum().backward()
        torch.testing.assert_close(assemble(x.grad), weight)
        assert x.grad.stride() == value.stride()
