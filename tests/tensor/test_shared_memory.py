"""Views see every write to the memory they view: through other names of the tensor, and to its local shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.errors import InputError
from shardwise.sharding.placement import AnyShard
from shardwise.testing import make_dtensor
from shardwise.world import common
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

Program = Callable[[Tensor], Sequence[Any]]

WORLDS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0)]),
    ((3,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((2,), [Replicate()]),
    ((2,), [Partial()]),
    ((2, 2), [Shard(0), Shard(1)]),
]
worlds = pytest.mark.parametrize(("sizes", "placements"), WORLDS, ids=[f"{s} {p}" for s, p in WORLDS])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return common(value.detach().full_tensor())
    return value.detach() if isinstance(value, Tensor) else value


def outcome(program: Program, tensor: Tensor) -> Any:
    """What the program returns, or the beginning of its error."""
    try:
        return [whole(result) for result in program(tensor)]
    except RuntimeError as error:
        return str(error).partition(".")[0].partition(":")[0]


def compare(program: Program, value: Tensor, sizes: tuple[int, ...], placements: list[Placement]) -> None:
    """The program does the same to a distributed tensor as to a plain one, or raises the same error."""
    wanted = outcome(program, value.clone())
    with mesh_of(*sizes) as mesh:
        found = outcome(program, make_dtensor(value, mesh, placements, seed=1))
    if isinstance(wanted, str) or isinstance(found, str):
        assert found == wanted
        return
    for have, want in zip(found, wanted, strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(have, want)
        else:
            assert have == want


# ---- writes that a view must see ------------------------------------------------------------------------------------


def local_shard(x: Tensor) -> Sequence[Any]:
    view = x[1:5]
    local(x).mul_(2)
    first = view * 1
    local(x).add_(local(x))
    return view, first


def local_shard_from_before(x: Tensor) -> Sequence[Any]:
    shards = local(x), local(x.data)
    view = x[1:5]
    shards[0].mul_(2)
    first = view * 1
    shards[1].add_(1)
    return view, first


def local_shard_of_data(x: Tensor) -> Sequence[Any]:
    view = x[1:5]
    local(x.data).mul_(2)
    return (view,)


def data(x: Tensor) -> Sequence[Any]:
    view = x[1:5]
    x.data.mul_(2)
    first = view * 1
    view.data.zero_()
    return view, first, x


def detached(x: Tensor) -> Sequence[Any]:
    view = x[1:5].detach()
    x.detach().mul_(2)
    return view, x


def same_size_dtype(x: Tensor) -> Sequence[Any]:
    view = x.view(torch.int32)
    first = view * 1
    x.zero_()
    second = view * 1
    local(x).fill_(2)
    return first, second, view


def smaller_dtype(x: Tensor) -> Sequence[Any]:
    view = x.view(torch.int16)
    x.zero_()
    first = view * 1
    view.add_(1)
    second = x * 1
    x.data.zero_()
    return first, second, view


def larger_dtype(x: Tensor) -> Sequence[Any]:
    view = x.view(torch.float64)
    x.add_(1)
    first = view * 1
    view.zero_()
    return first, x


def dtype_of_a_slice(x: Tensor) -> Sequence[Any]:
    view = x[1:5].view(torch.int32)
    x.zero_()
    first = view * 1
    view.add_(3)
    return first, view, x


def lists(x: Tensor) -> Sequence[Any]:
    view = x[1:5]
    torch._foreach_mul_([x[:2], x[3:6]], 2.0)
    first = view * 1
    torch._foreach_mul_([x, x * 1], 3.0)
    return first, view, x


def again_and_again(x: Tensor) -> Sequence[Any]:
    """Plans of the first run are taken from the hot path in the others."""
    view, seen = x[1:5], []
    for _ in range(4):
        x.add_(1)
        seen.append(view * 1)
        view.mul_(2)
        seen.append(x * 1)
    return seen


def other_data(x: Tensor) -> Sequence[Any]:
    """A view stays with the memory that it views, when the tensor is given other memory."""
    view = x[1:5]
    x.data = x.data * 0
    x.add_(1)
    view.add_(5)
    return view, x


def turned_view(x: Tensor) -> Sequence[Any]:
    """A view that is turned in place is still one."""
    view = x[1:5]
    view.t_()
    view.mul_(2)
    first = view * 1
    x.add_(1)
    view.unsqueeze_(0)
    view.zero_()
    return first, view, x


def data_is_a_view(x: Tensor) -> Sequence[Any]:
    other = x.detach() * 0
    other.data = x[2:6]
    other.mul_(2)
    x.add_(1)
    return other, x


READS = [
    local_shard,
    local_shard_from_before,
    local_shard_of_data,
    data,
    detached,
    same_size_dtype,
    smaller_dtype,
    larger_dtype,
    dtype_of_a_slice,
    lists,
    again_and_again,
    other_data,
    turned_view,
    data_is_a_view,
]


@worlds
@pytest.mark.parametrize("program", READS, ids=lambda program: program.__name__)
def test_views_see_writes(program: Program, sizes: tuple[int, ...], placements: list[Placement]) -> None:
    value = torch.arange(32.0).reshape(8, 4) - 11
    if program in (local_shard, local_shard_from_before, same_size_dtype) and placements == [Partial()]:
        return  # what is written to one summand is not what is written to the sum
    compare(program, value, sizes, placements)


@on_processes
def test_views_see_writes_on_processes() -> None:
    from shardwise import init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    value = torch.arange(32.0).reshape(8, 4) - 11
    for program in READS:
        wanted = program(value.clone())
        found = program(make_dtensor(value, mesh, [Shard(0)], seed=1))
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have.full_tensor(), want)


# ---- expanded tensors -----------------------------------------------------------------------------------------------


def filled(x: Tensor) -> Sequence[Any]:
    view = x.expand(3, 4)
    view.fill_(2)
    first = x * 1
    x.expand(2, 5, 4).zero_()
    return view, first, x


def added(x: Tensor) -> Sequence[Any]:
    x.expand(3, 4).add_(1)
    return (x,)


@worlds
@pytest.mark.parametrize("program", [filled, added], ids=lambda program: program.__name__)
def test_writes_to_expanded_tensors(program: Program, sizes: tuple[int, ...], placements: list[Placement]) -> None:
    compare(program, torch.arange(4.0).reshape(1, 4), sizes, placements)


@worlds
def test_gradients_of_expanded_tensors(sizes: tuple[int, ...], placements: list[Placement]) -> None:
    def program(x: Tensor) -> Sequence[Any]:
        x.requires_grad_()
        wide = x.unsqueeze(1).expand(8, 3, 4)
        leaf = wide.detach().requires_grad_()
        weight = (x.detach() * 1).unsqueeze(1) * wide.detach()[:1, :, :].cumsum(1)
        if isinstance(wide, DTensor):
            wide = wide.redistribute(placements=[Replicate()] * len(sizes))
        (wide * weight).sum().backward()
        (leaf * leaf * weight).sum().backward()
        return x.grad, leaf.grad

    compare(program, torch.arange(32.0).reshape(8, 4) - 11, sizes, placements)


# ---- views that one device refuses ----------------------------------------------------------------------------------

ILLEGAL: dict[str, Program] = {
    "transposed": lambda x: [x.t().view(-1)],
    "columns": lambda x: [x[:, :2].view(-1)],
    "computed from transposed": lambda x: [(x.t() + 1).view(-1)],
    "expanded": lambda x: [x[:, :1].expand(8, 3).view(-1)],
    "every other row": lambda x: [x[::2].view(-1)],
    "rows": lambda x: [x[2:5].view(-1)],
    "a larger dtype of columns": lambda x: [x[:, :3].view(torch.float64)],
    "a smaller dtype of transposed": lambda x: [x.t().view(torch.int16)],
    "norm of transposed": lambda x: [torch.nn.functional.rms_norm(x.t(), (8,)).view(-1)],
}


@worlds
@pytest.mark.parametrize("name", ILLEGAL)
def test_the_same_views_are_legal(name: str, sizes: tuple[int, ...], placements: list[Placement]) -> None:
    compare(ILLEGAL[name], torch.arange(32.0).reshape(8, 4) - 11, sizes, placements)


# ---- writes to what backward needs ----------------------------------------------------------------------------------


def needed(write: Callable[[Tensor], object]) -> Program:
    def program(x: Tensor) -> Sequence[Any]:
        h = x.requires_grad_() * 1
        y = h.sin()
        write(h)
        y.sum().backward()
        return (x.grad,)

    return program


def without_grad(write: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def run(h: Tensor) -> None:
        with torch.no_grad():
            write(h)

    return run


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda h: h.add_(1),
    "rows": lambda h: h[1:3].zero_(),
    "setitem": lambda h: h.__setitem__(slice(1, 3), 0),
    "out": without_grad(lambda h: torch.add(h, 1, out=h)),
    "foreach": without_grad(lambda h: torch._foreach_add_([h], 1.0)),
    "foreach rows": without_grad(lambda h: torch._foreach_add_([h[1:3]], 1.0)),
    "foreach twice": without_grad(lambda h: [torch._foreach_add_([h, h * 1], 1.0) for _ in range(3)]),
    "dropout": without_grad(lambda h: torch.nn.functional.dropout(h, 0.5, inplace=True)),
    "data, which does not count": lambda h: h.data.add_(1),
    "local shard": lambda h: local(h.detach()).add_(1),
    "local shard without grad": without_grad(lambda h: local(h).add_(1)),
    "local shard with grad": lambda h: local(h).add_(1),
    "rows of a local shard": without_grad(lambda h: local(h)[:1].zero_()),
    "local shard of data, which does not count": lambda h: local(h.data).mul_(1),
}


@worlds
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_what_backward_needs(name: str, sizes: tuple[int, ...], placements: list[Placement]) -> None:
    compare(needed(WRITES[name]), torch.arange(32.0).reshape(8, 4) - 11, sizes, placements)


# ---- where in its storage a view begins -----------------------------------------------------------------------------


def offsets(x: Tensor) -> Sequence[Any]:
    views = [x[1:], x[2], x[:, 1], x[1:, 1:].t()[1], x.unbind(0)[2], x.split(3)[1], x.chunk(3)[2], x.diagonal(1)]
    views += [x.select(1, 2), x[1:].view(-1), x[1:].detach(), x[1:] + 1, x.view(torch.int16)[1:]]
    views += [x[1:].view(torch.int16), x[1:].view(torch.float64), x.narrow(0, 2, 3).unsqueeze(0).expand(3, 3, 4)]
    views += [x.unfold(0, 2, 1)[1], x[2:4].t_(), *x[1:].split(2), *x[1:].view(torch.int16).unbind(0)]
    return [view.storage_offset() for view in views]


@worlds
def test_storage_offsets(sizes: tuple[int, ...], placements: list[Placement]) -> None:
    def twice(x: Tensor) -> Sequence[Any]:
        return [*offsets(x), *offsets(x)]  # planned, and from the hot path

    compare(twice, torch.arange(32.0).reshape(8, 4) - 11, sizes, placements)


STRIDED: dict[str, Program] = {
    "before a view": lambda x: [torch.as_strided(x[2:], (3,), (1,), 0)],
    "where the view begins": lambda x: [torch.as_strided(x[2:], (3,), (1,)), x[2:].as_strided((3,), (1,), 1)],
    "of every other element": lambda x: [x[::2].as_strided((3,), (2,), 1), x[::2].as_strided((6,), (1,), 0)],
    "itself": lambda x: [x[2:].as_strided((6,), (1,)), x[2:].as_strided((6,), (1,), 2)],
    "written": lambda x: [x[4:].as_strided((2, 2), (1, 2), 1).zero_(), x],
    "of a view of itself": lambda x: [x[4:].as_strided((3,), (1,), 2).as_strided((2,), (3,), 0)],
    "of a dtype": lambda x: [x[2:].view(torch.int32).as_strided((3,), (1,), 4)],
    "scattered": lambda x: [x.as_strided_scatter(x[:2] * 3, (2,), (4,), 1)],
}


@worlds
@pytest.mark.parametrize("name", STRIDED)
def test_as_strided(name: str, sizes: tuple[int, ...], placements: list[Placement]) -> None:
    placed = [Shard(0) if isinstance(placement, AnyShard) else placement for placement in placements]
    for _ in range(2):
        compare(STRIDED[name], torch.arange(8.0) - 3, sizes, placed)


@worlds
def test_gradients_of_as_strided(sizes: tuple[int, ...], placements: list[Placement]) -> None:
    def program(x: Tensor) -> Sequence[Any]:
        h = x.requires_grad_() * 1
        y = h[2:].as_strided((3, 2), (1, 1), 1)
        (y * y).sum().backward()
        return y, x.grad

    placed = [Shard(0) if isinstance(placement, AnyShard) else placement for placement in placements]
    compare(program, torch.arange(8.0) - 3, sizes, placed)


def test_as_strided_beyond_what_is_known() -> None:
    with mesh_of(2) as mesh, pytest.raises(InputError, match="reaches memory that the tensor does not hold"):
        make_dtensor(torch.arange(8.0), mesh, [Shard(0)], seed=0)[2:].detach().as_strided((3,), (1,), 0)
