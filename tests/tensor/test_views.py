"""Views see what is written to what they view, and the other way round, also where no local memory is shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.testing import make_dtensor
from shardwise.world import common

Program = Callable[[Tensor], list[Tensor]]


def zero_rows(d: Tensor) -> list[Tensor]:
    d[:2].zero_()
    return [d]


def set_rows(d: Tensor) -> list[Tensor]:
    d[2:5] = 7.0
    return [d]


def set_step(d: Tensor) -> list[Tensor]:
    d[1::3] *= 2
    return [d]


def flat(d: Tensor) -> list[Tensor]:
    v = d.view(4, -1)
    v.add_(1)
    d.view(-1).mul_(2)
    return [d, v]


def transposed(d: Tensor) -> list[Tensor]:
    d.t().mul_(2)
    d.t()[1].zero_()
    return [d]


def chunks(d: Tensor) -> list[Tensor]:
    a, b = d[:5], d[5:]
    a.zero_()
    b.add_(1)
    return [d, a, b]


def overlapping(d: Tensor) -> list[Tensor]:
    a, b = d[1:5], d[3:7]
    a.mul_(2)
    b.add_(1)
    d.sub_(3)
    return [d, a, b]


def view_of_view(d: Tensor) -> list[Tensor]:
    v = d[1:6].t()[2]
    w = d.view(-1)
    w.mul_(3)
    v.add_(1)
    return [d, v, w]


def elements(d: Tensor) -> list[Tensor]:
    d[3][1] = 5.0
    d[-1, :2] += 1
    d[0, 0] = -2.0
    return [d]


def squeezed(d: Tensor) -> list[Tensor]:
    d.unsqueeze(0)[0, 2:4].squeeze(0).fill_(3.0)
    d[2:3].squeeze(0).add_(1)
    return [d]


def diagonals(d: Tensor) -> list[Tensor]:
    d.diagonal().zero_()
    d[2:].diagonal().add_(1)
    return [d]


def read_between(d: Tensor) -> list[Tensor]:
    v = d[2:6]
    first = v * 1
    d.add_(1)
    second = v * 1
    v.mul_(2)
    third = d * 1
    return [first, second, third, v, d]


def copied(d: Tensor) -> list[Tensor]:
    d[:3].copy_(d[4:7].clone())
    return [d]


PROGRAMS: list[Program] = [
    zero_rows,
    set_rows,
    set_step,
    flat,
    transposed,
    chunks,
    overlapping,
    view_of_view,
    elements,
    squeezed,
    diagonals,
    read_between,
    copied,
]
MULTI_VIEWS: list[Program] = [
    lambda d: [p.zero_() if i == 1 else p for i, p in enumerate(d.chunk(3))] + [d],
    lambda d: [p.add_(i) for i, p in enumerate(d.split([1, 0, 5, 2]))] + [d],
    lambda d: [p.mul_(i) for i, p in enumerate(d.unbind(0))] + [d],
    lambda d: [p.mul_(i) for i, p in enumerate(d.unbind(1))] + [d],
]
WORLDS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0)]),
    ((3,), [Shard(0)]),
    ((2,), [Replicate()]),
    ((2,), [Partial()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Partial(), Shard(0)]),
]
worlds = pytest.mark.parametrize(("sizes", "placements"), WORLDS, ids=[f"{s} {p}" for s, p in WORLDS])


def value() -> Tensor:
    return torch.arange(32.0).reshape(8, 4) - 11


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return common(tensor.full_tensor()) if isinstance(tensor, DTensor) else tensor


def compare(
    program: Program, sizes: Sequence[int], placements: list[Placement], *, requires_grad: bool = False
) -> None:
    """The program does the same to a distributed tensor as to a plain one, or raises the same error."""

    def outcome(tensor: Tensor) -> Any:
        try:
            return [whole(result) for result in program(tensor.requires_grad_(requires_grad))]
        except RuntimeError as error:
            return str(error).partition(".")[0]

    wanted = outcome(value())
    with shardwise.simulate(math.prod(sizes)):
        mesh = init_device_mesh("cpu", tuple(sizes))
        found = outcome(make_dtensor(value(), mesh, placements, seed=1))
    if isinstance(wanted, str) or isinstance(found, str):
        assert found == wanted
        return
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)


def with_gradients(program: Program) -> Program:
    def run(d: Tensor) -> list[Tensor]:
        h = d * 1.5
        results = program(h)
        loss: Any = sum((result * result).sum() for result in results)
        loss.backward()
        assert d.grad is not None
        return [*results, d.grad]

    return run


@worlds
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
class TestPrograms:
    def test_plain(self, program: Program, sizes: Sequence[int], placements: list[Placement]) -> None:
        compare(program, sizes, placements)

    def test_no_grad_on_a_leaf(self, program: Program, sizes: Sequence[int], placements: list[Placement]) -> None:
        with torch.no_grad():
            compare(program, sizes, placements, requires_grad=True)

    def test_inference(self, program: Program, sizes: Sequence[int], placements: list[Placement]) -> None:
        with torch.inference_mode():
            compare(program, sizes, placements)

    def test_inference_on_outside_tensors(
        self, program: Program, sizes: Sequence[int], placements: list[Placement]
    ) -> None:
        def inside(d: Tensor) -> list[Tensor]:
            with torch.inference_mode():
                return program(d)

        compare(inside, sizes, placements)

    def test_gradients(self, program: Program, sizes: Sequence[int], placements: list[Placement]) -> None:
        compare(with_gradients(program), sizes, placements, requires_grad=True)

    def test_leaf_errors(self, program: Program, sizes: Sequence[int], placements: list[Placement]) -> None:
        compare(program, sizes, placements, requires_grad=True)


@worlds
@pytest.mark.parametrize("program", MULTI_VIEWS, ids=["chunk", "split", "unbind", "unbind last"])
def test_several_views_at_once(program: Program, sizes: Sequence[int], placements: list[Placement]) -> None:
    with torch.no_grad():
        compare(program, sizes, placements)
    with torch.inference_mode():
        compare(program, sizes, placements)
    compare(with_gradients(program), sizes, placements, requires_grad=True)


# ---- the same data under another name -----------------------------------------------------------------------------


def detached(d: Tensor) -> list[Tensor]:
    h = d * 1
    e = h.detach()
    e[1:3].zero_()
    e.t()[0].add_(1)
    return [h, e]


def data(d: Tensor) -> list[Tensor]:
    h = d * 1
    h.data[1:3].zero_()
    h.data.mul_(2)
    v = h[2:6]
    return [h, v * 1]


def data_of_a_view(d: Tensor) -> list[Tensor]:
    h = d.detach() * 1
    v = h[2:6]
    v.data.zero_()
    h.add_(1)
    return [h, v, v.data, v.detach()]


def saved_for_backward(d: Tensor) -> list[Tensor]:
    h = d * 1
    y = h * h
    h[2:3].zero_()
    y.sum().backward()
    return [y]


def turned(d: Tensor) -> list[Tensor]:
    h = d * 1
    h.t_()
    h.unsqueeze_(1)
    h.transpose_(0, 2)
    h.squeeze_()
    h[1:3].t_()
    return [h, h.t_() + 1, h * 2]


@worlds
@pytest.mark.parametrize(
    "program", [detached, data, data_of_a_view, saved_for_backward, turned], ids=lambda p: p.__name__
)
def test_other_names(program: Program, sizes: Sequence[int], placements: list[Placement]) -> None:
    compare(program, sizes, placements, requires_grad=True)


# ---- in place, the placements stay --------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda d: d.add_(1.5),
    "add_ itself": lambda d: d.add_(d),
    "mul_": lambda d: d.mul_(-2),
    "clamp_": lambda d: d.clamp_(-3, 4),
    "relu_": lambda d: d.relu_(),
    "fill_": lambda d: d.fill_(3),
    "zero_": lambda d: d.zero_(),
    "setitem": lambda d: d.__setitem__(slice(1, 3), 4.0),
    "setitem row": lambda d: d.__setitem__(1, 4.0),
    "copy_": lambda d: d.copy_(d.t().reshape(8, 4)),
    "masked_fill_": lambda d: d.masked_fill_(d > 0, 1.0),
    "cumsum_": lambda d: d.cumsum_(1),
    "index_fill_": lambda d: d.index_fill_(0, torch.ops.aten._to_copy(d[:2, 0] * 0, dtype=torch.long), 2.0),
    "tril_": lambda d: d.tril_(),
}


@worlds
@pytest.mark.parametrize("name", WRITES)
def test_writes_keep_placements(name: str, sizes: Sequence[int], placements: list[Placement]) -> None:
    wanted = value()
    WRITES[name](wanted)
    with shardwise.simulate(math.prod(sizes)):
        d = make_dtensor(value(), init_device_mesh("cpu", tuple(sizes)), placements, seed=1)
        local = d.to_local()
        WRITES[name](d)
        assert d.placements == tuple(placements)
        assert d.to_local() is local
        torch.testing.assert_close(whole(d), wanted)


# ---- wrapper and shard stay together ------------------------------------------------------------------------------


def distributed(placements: list[Placement]) -> nn.Module:
    """A layer whose parameters are sharded over the ranks of this world."""
    mesh = init_device_mesh("cpu", (2,))
    layer = nn.Linear(4, 6)
    for name, parameter in list(layer.named_parameters()):
        cut = shardwise.distribute_tensor(parameter.detach(), mesh, placements)
        layer.register_parameter(name, nn.Parameter(cut))
    return layer


def agree(tensor: Tensor, dtype: torch.dtype) -> None:
    """Wrapper, spec and shard agree."""
    assert isinstance(tensor, DTensor)
    assert tensor.dtype == tensor._spec.dtype == tensor._local_tensor.dtype == dtype
    assert tensor.shape == tensor._spec.shape
    assert tensor.full_tensor().shape == tensor.shape


@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()]], ids=str)
class TestModules:
    def test_dtypes(self, placements: list[Placement]) -> None:
        with shardwise.simulate(2):
            layer = distributed(placements)
            before = {name: whole(parameter) for name, parameter in layer.named_parameters()}
            for convert, dtype in (
                (lambda m: m.double(), torch.float64),
                (lambda m: m.to(torch.bfloat16), torch.bfloat16),
                (lambda m: m.float(), torch.float32),
            ):
                convert(layer)
                for name, parameter in layer.named_parameters():
                    agree(parameter, dtype)
                    assert parameter.requires_grad
                    assert isinstance(parameter, nn.Parameter)
                    assert list(parameter.placements) == placements
                    torch.testing.assert_close(whole(parameter).float(), before[name], atol=1e-2, rtol=1e-2)

    def test_gradients_after_a_conversion(self, placements: list[Placement]) -> None:
        with shardwise.simulate(2):
            layer = distributed(placements).double()
            x = shardwise.ones(3, 4, dtype=torch.float64, device_mesh=layer.weight.device_mesh)
            layer(x).sum().backward()
            agree(layer.weight.grad, torch.float64)
            assert list(layer.weight.grad.placements) == placements
            layer.to(torch.float32)
            agree(layer.weight.grad, torch.float32)

    def test_to_empty(self, placements: list[Placement]) -> None:
        with shardwise.simulate(2):
            layer = distributed(placements)
            layer.to_empty(device="cpu")
            for parameter in layer.parameters():
                agree(parameter, torch.float32)
                assert list(parameter.placements) == placements

    def test_data(self, placements: list[Placement]) -> None:
        with shardwise.simulate(2):
            layer = distributed(placements)
            parameter = layer.weight
            parameter.data = parameter.data.double()[1:4] * 2
            agree(parameter, torch.float64)
            assert parameter.shape == (3, 4)
            assert parameter is layer.weight
            assert parameter.requires_grad
            with torch.no_grad():
                parameter.zero_()
            assert not whole(parameter).any()


def test_views_of_parts_that_some_ranks_lack() -> None:
    """Six rows over four ranks: the last has none. The view must be one of memory on the others, in any order."""
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        value = torch.arange(210.0).view(5, 6, 7)
        found = torch.fft.rfftn(make_dtensor(value, mesh, [Shard(1)], seed=0), dim=(0, 2))
        expected = torch.fft.rfftn(value, dim=(0, 2))
        assert found.stride() == expected.stride() == (4, 20, 1)
        found.narrow(2, 1, 3).mul_(2)
        expected.narrow(2, 1, 3).mul_(2)
        torch.testing.assert_close(whole(found), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "turn",
    [
        lambda x: x.as_strided_((2, 3), (1, 4), 1),
        lambda x: x.unsqueeze_(1).unsqueeze_(0).squeeze_((0, 2)),
        lambda x: x.transpose_(0, 1),
        lambda x: x.unsqueeze_(0).squeeze_(),
    ],
    ids=["as_strided_", "squeeze_ of several", "transpose_", "squeeze_"],
)
def test_tensors_turned_into_views_of_themselves(turn: Callable[[Tensor], Tensor]) -> None:
    value = torch.arange(12.0).view(3, 4)
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            x = make_dtensor(value, mesh, [placement], seed=0)
            assert turn(x) is x
            assert torch.equal(whole(x), turn(value.clone()))


def test_a_sharded_dim_of_size_one_stays_sharded() -> None:
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        x = shardwise.distribute_tensor(torch.arange(8.0).view(1, 2, 2, 2), mesh, [Shard(0)])
        with shardwise.explicit():  # no communication
            y = x.view(1, 2, 4)
        assert y.placements == (Shard(0),)
        assert [tuple(shard.shape) for shard in y.shards.values()] == [(1, 2, 4), *[(0, 2, 4)] * 3]
        assert y.shards[0].data_ptr() == x.shards[0].data_ptr()


@pytest.mark.parametrize("sizes", [(3,), (3, 2)], ids=str)
def test_a_flattened_dim_is_split_inside_its_blocks(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(72.0).view(4, 6, 3)
    with shardwise.simulate(math.prod(sizes)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        x = shardwise.distribute_tensor(whole, mesh, [Shard(1), Shard(0)][: len(sizes)]).flatten(0, 1)
        with shardwise.explicit():  # no communication
            y = x.view(12, 2, 3)
            z = x.view(2, 2, 3, 2, 3)
        assert repr(y.spec) == ("f32[(4 3@a), 2, 3]" if len(sizes) == 1 else "f32[(4@b 3@a), 2, 3]")
        assert torch.equal(y.full_tensor().shards[1], whole.view(12, 2, 3))
        assert torch.equal(z.full_tensor().shards[1], whole.view(2, 2, 3, 2, 3))
        assert torch.equal(x.view(8, 3, 3).full_tensor().shards[1], whole.view(8, 3, 3))
