"""Plain tensors of one element meet distributed ones as numbers do; shapes and values are compared across kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import MeshError, MixedTensorError
from tests.ops.helpers import on, r, ranks, whole
from tests.processes.pool import on_processes


def in_place(x: Tensor, n: Tensor) -> Tensor:
    return x.clone().mul_(n)


def assigned(x: Tensor, n: Tensor) -> Tensor:
    x = x.clone()
    x[2:5] = n.reshape(-1)
    return x


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, n: x + n,
    "in front": lambda x, n: n / x,
    "where": lambda x, n: torch.where(x > 0, x, n),
    "extreme": lambda x, n: torch.maximum(n, x),
    "three operands": lambda x, n: torch.addcmul(x, n, x),
    "product": lambda x, n: x.reshape(-1, 1) @ n.reshape(1, 1),
    "layer": lambda x, n: F.linear(x.reshape(-1, 1), n.reshape(1, 1), n.reshape(1)),
    "in place": in_place,
    "assigned": assigned,
}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("name", OPS)
def test_one_element(name: str, shape: tuple[int, ...]) -> None:
    if name == "in place" and len(shape) > 2:
        return  # it would change the shape of what is written
    x, number = r(8, 4), torch.full(shape, 0.5)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x.requires_grad_()
        result = OPS[name](x, number)
        result.square().sum().backward()
        return result.detach(), x.grad  # type: ignore[return-value]

    expected = run(x.clone())
    for placement in (Shard(0), Shard(1), Replicate()):
        with ranks(3) as mesh:
            found = run(on(mesh, x, placement))
            for mine, wanted in zip(found, expected, strict=True):
                assert isinstance(mine, DTensor)
                torch.testing.assert_close(whole(mine), wanted)


def test_more_elements_are_still_refused() -> None:
    with ranks(2) as mesh:
        x = on(mesh, r(8, 4), Shard(0))
        for plain in (torch.ones(4), torch.ones(8, 1), torch.ones(4).expand(8, 4)):
            with pytest.raises(MixedTensorError):
                x + plain


def check_comparisons(mesh: Any, other_mesh: Any) -> None:
    data = torch.arange(28.0).reshape(7, 4)
    other = distribute_tensor(data, other_mesh, [Shard(0), Replicate()])
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(data, mesh, [placement])
        for one, two in ((x, data), (data, x), (x, x), (x, other)):
            assert torch.is_same_size(one, two)
        assert not torch.is_same_size(x, data[1:])
        assert x.equal(data)
        assert data.equal(x)
        assert not torch.equal(x, data + (data == 27))  # on one rank alone
        assert not torch.equal(data.T, x)
        with pytest.raises(MeshError):
            torch.equal(x, other)


def test_shapes_and_values_compare_with_those_of_plain_tensors() -> None:
    with shardwise.simulate(4):
        check_comparisons(init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


@on_processes
def test_on_processes() -> None:
    mesh = init_device_mesh("cpu", (4,))
    check_comparisons(mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    x = distribute_tensor(r(8, 4), mesh, [Shard(0)])
    torch.testing.assert_close((x * torch.full((1, 1), 3.0)).full_tensor(), 3 * r(8, 4))


LISTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "add": lambda xs: torch._foreach_add(xs, xs, alpha=2),
    "by a number": lambda xs: torch._foreach_mul(xs, 2.0),
    "by a plain number": lambda xs: torch._foreach_mul(xs, torch.tensor(2.0)),
    "by numbers": lambda xs: torch._foreach_div(xs, [2.0, 3.0, 4.0]),
    "three lists": lambda xs: torch._foreach_addcmul(xs, xs, xs, [1.0, 2.0, 3.0]),
    "between": lambda xs: torch._foreach_lerp(xs, torch._foreach_neg(xs), 0.3),
    "norm": lambda xs: torch._foreach_norm(xs),
    "maximum": lambda xs: torch._foreach_max(xs),
    "in place": lambda xs: torch._foreach_add_(xs, xs),
    "copied": lambda xs: torch._foreach_copy_(xs, torch._foreach_mul(xs, 3.0)),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_over_several_meshes(name: str) -> None:
    data = [r(8, 4), r(5, 4, seed=1), r(3, seed=2)]
    expected = [tensor.clone() for tensor in data]
    expected = LISTS[name](expected) or expected
    with shardwise.simulate(4):
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mine = [
            distribute_tensor(data[0], line, [Shard(0)]),
            distribute_tensor(data[1], square, [Shard(0), Shard(1)]),
            data[2].clone(),
        ]
        found = LISTS[name](mine) or mine  # type: ignore[arg-type]
        assert [isinstance(tensor, DTensor) for tensor in found] == [True, True, False]
        for tensor, wanted in zip(found, expected, strict=True):
            value = whole(tensor) if isinstance(tensor, DTensor) else shardwise.world.common(tensor)
            torch.testing.assert_close(value, wanted)
