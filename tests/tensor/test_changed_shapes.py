"""Ops that change the shape of a tensor in place (`t_`, `unsqueeze_`), with views of it alive: values and gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.errors import InputError, SavedTensorError
from shardwise.testing import make_dtensor
from tests.worlds import mesh_of

SHAPE = (4, 1, 3)
PLACEMENTS: list[Placement] = [Shard(0), Shard(2), Replicate(), Partial()]

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(1, 2),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "unsqueeze_ last": lambda x: x.unsqueeze_(-1),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ a dim": lambda x: x.squeeze_(1),
    "squeeze_ nothing": lambda x: x.squeeze_(0),
    "squeeze_ and t_": lambda x: x.squeeze_((1,)).t_(),
    "two changes": lambda x: x.unsqueeze_(0).transpose_(1, 3),
    "as_strided_": lambda x: x.as_strided_((3, 4), (1, 3)),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: x[1],
    "slice": lambda x: x[..., 1:],
    "flat": lambda x: x.view(-1),
    "transposed": lambda x: x.transpose(0, 2),
    "unsqueezed": lambda x: x.unsqueeze(0),
    "squeezed": lambda x: x.squeeze(1),
    "expanded": lambda x: x.expand(4, 5, 3),
    "diagonal": lambda x: x.diagonal(0, 0, 2),
    "windows": lambda x: x.unfold(0, 2, 2),
    "split": lambda x: x.split(2)[1],
    "unbound": lambda x: x.unbind(2)[0],
    "strided": lambda x: x.as_strided((2, 2), (3, 1), 1),
    "chain": lambda x: x[1:].transpose(0, 2)[:2].squeeze(1),
}
Program = Callable[[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], list[Tensor]]


def weighted(x: Tensor) -> Tensor:
    """A sum in which every element of `x` has its own weight."""
    flat = x.reshape(-1)
    return (flat * flat.detach().new_ones(flat.shape).cumsum(0)).sum()


def older_view(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = w * 1
    v = view(x)
    change(x)
    (weighted(x) + 2 * weighted(v)).backward()
    return [x, v]


def older_view_then_base_written(
    w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    x = w * 1
    v = view(x)
    change(x)
    x.mul_(3)
    (weighted(x) + 2 * weighted(v)).backward()
    return [x, v]


def older_view_written(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = w * 1
    v = view(x)
    change(x)
    v.mul_(3)
    (weighted(x) + 2 * weighted(v)).backward()
    return [x, v]


def view_of_a_view(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    y = w.repeat(2, 1, 1) * 1
    x = y[:4]
    v = view(x)
    change(x)
    y.mul_(2)
    (weighted(x) + 2 * weighted(v) + 3 * weighted(y)).backward()
    return [x, v, y]


def changed_view(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    y = w.repeat(2, 1, 1) * 1
    x = y[4:]
    change(x)
    loss = weighted(x)
    x.mul_(2)
    v = x[..., :1]
    y.add_(1)
    (loss + weighted(x) + 2 * weighted(v) + 3 * weighted(y)).backward()
    return [x, v, y]


def leaf_without_grad(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = w[:]
    with torch.no_grad():
        v = view(x)
        change(x)
    weighted(x).backward()
    return [x.detach(), v]


def leaf(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """On one device the gradient of the leaf has another shape than at the time of the view: an error, or right."""
    v = view(w)
    with torch.no_grad():
        change(w)
    (weighted(v) + weighted(w)).backward()
    return [w.detach(), v]


def grad_comes_later(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = w.detach().clone()
    v = view(x)
    change(x)
    other = w * 1
    change(other)
    x.add_(other)
    (weighted(x) + 2 * weighted(v)).backward()
    return [x, v]


def without_grad(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = w.detach().clone()
    v = view(x)
    change(x)
    v.add_(1)
    x.mul_(2)
    return [x, v]


def hooks(w: Tensor, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    y = w.repeat(2, 1, 1) * 1
    x = y[4:]
    x.register_hook(lambda grad: grad * 2)
    change(x)
    (weighted(x) + weighted(y)).backward()
    return [x, y]


PROGRAMS: list[Program] = [
    older_view,
    older_view_then_base_written,
    older_view_written,
    view_of_a_view,
    changed_view,
    leaf_without_grad,
    leaf,
    grad_comes_later,
    without_grad,
    hooks,
]


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    """Views are found among the objects that the garbage collector knows: keep those of other tests out."""
    gc.freeze()
    yield
    gc.unfreeze()


def outcome(program: Program, w: Tensor, view: str, change: str) -> list[Tensor] | RuntimeError:
    try:
        found = program(w, VIEWS[view], CHANGES[change])
    except RuntimeError as error:
        return error
    return [*found, *([] if w.grad is None else [w.grad])]


def compare(program: Program, mesh: DeviceMesh, placement: Placement, view: str, change: str) -> None:
    value = torch.randint(-4, 5, SHAPE).float()
    wanted = outcome(program, value.clone().requires_grad_(), view, change)
    x = make_dtensor(value, mesh, [placement], seed=0).requires_grad_()
    found = outcome(program, x, view, change)
    case = (program.__name__, view, change, placement)
    if isinstance(wanted, RuntimeError):
        assert isinstance(found, RuntimeError), f"{case}: one device raises {wanted}"
        return
    assert not isinstance(found, RuntimeError), f"{case}: {found!r}"
    for one, other in zip(wanted, found, strict=True):
        assert isinstance(other, DTensor)
        assert torch.equal(one.detach(), other.detach().full_tensor()), f"{case}: {one} {other.full_tensor()}"
        assert one.requires_grad == other.requires_grad, case


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_on_one_device(program: Program) -> None:
    views, changes = list(VIEWS), list(CHANGES)
    with mesh_of(2) as mesh:
        for index in range(len(views) * len(changes)):  # a part of all pairs, each view and each change several times
            if index % 5 == PROGRAMS.index(program) % 5:
                view, change = views[index % len(views)], changes[index % len(changes)]
                compare(program, mesh, PLACEMENTS[index // 5 % len(PLACEMENTS)], view, change)


def test_a_view_that_backward_needs() -> None:
    """On one device the backward pass raises an error."""
    with mesh_of(2) as mesh:
        w = make_dtensor(torch.ones(4, 3), mesh, [Shard(0)], seed=0).requires_grad_()
        x = w * 1
        row = x[1]
        y = row * row
        with pytest.raises(SavedTensorError, match="a backward pass needs it"):
            x.t_()
        with pytest.raises(SavedTensorError, match="a backward pass needs it"):
            row.unsqueeze_(0)
        y.sum().backward()
        assert w.grad is not None
        assert w.grad.full_tensor()[1].tolist() == [2, 2, 2]


def test_views_of_elements_that_are_left_out() -> None:
    with mesh_of(2) as mesh:
        x = make_dtensor(torch.ones(4, 3), mesh, [Shard(0)], seed=0)
        row = x[1]
        with pytest.raises(InputError, match="leaves out elements"):
            x.as_strided_((2, 3), (3, 1))
        assert row.shape == x.shape[1:]


def test_a_view_that_is_a_leaf_of_its_own() -> None:
    with mesh_of(2) as mesh:
        x = make_dtensor(torch.ones(4, 3), mesh, [Shard(0)], seed=0)
        row = x[1].requires_grad_()
        x.t_()
        (row * 2).sum().backward()
        assert row.grad is not None
        assert row.grad.shape == (3,)
        with torch.no_grad():
            row.unsqueeze_(0)
        row.grad = None
        (row * 2).sum().backward()
        assert row.grad.shape == (1, 3)
