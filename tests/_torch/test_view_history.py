"""The private names behind `_torch.view_history`."""

import torch
from torch import Tensor

from shardwise._torch.view_history import (
    become,
    copy_hooks,
    is_held,
    is_recorded,
    remade,
    views_of,
    views_recorded_as_ops,
    was_made_without_grad,
)
from shardwise._torch.wrapper import make_wrapper, no_torch_function


class Wrapper(Tensor):
    """A subclass whose views autograd makes again by repeating the calls that made them."""

    __torch_function__ = no_torch_function
    inner: Tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        made = func(*(value.inner if isinstance(value, cls) else value for value in args), **(kwargs or {}))
        return [wrapped(each) for each in made] if isinstance(made, (list, tuple)) else wrapped(made)


def wrapped(inner: Tensor) -> Wrapper:
    made = make_wrapper(Wrapper, inner.shape, inner.stride(), dtype=inner.dtype)
    made.inner = inner
    return made


def test_views_of_finds_what_a_program_can_reach() -> None:
    x = wrapped(torch.ones(4, 3))
    assert not is_held(x)
    assert views_of(x, {Wrapper}) == []
    row = x[1:]
    assert is_held(x)
    assert [id(view) for view in views_of(x, {Wrapper})] == [id(row)]
    column = row.t()[0]  # row.t() cannot be reached
    found = {id(view) for view in views_of(x, {Wrapper})}
    assert {id(row), id(column)} <= found
    if torch.__version__ >= (2, 13):
        assert found == {id(row), id(column)}


def test_views_and_nodes_hold_a_tensor() -> None:
    x = wrapped(torch.ones(4, 3)).requires_grad_() * 1
    row = x[0]
    assert not is_held(row)
    square = row * row
    assert is_held(row)
    del square
    assert not is_held(row)
    column = row[:1]
    assert is_held(row)
    del column


def test_how_a_view_was_made() -> None:
    x = wrapped(torch.ones(4, 3)).requires_grad_() * 1
    with torch.no_grad():
        quiet = x[0]
    assert [is_recorded(view) for view in (x[0], quiet, x.unbind()[0])] == [True, False, False]
    assert [was_made_without_grad(view) for view in (x[0], quiet)] == [False, True]


def test_a_view_becomes_another_view() -> None:
    leaf = wrapped(torch.ones(4, 3)).requires_grad_()
    x = leaf * 1
    row = x[1]
    row.mark = "kept"
    again = remade(row, x.t())
    assert again.shape == (4,)
    become(row, again)
    assert (row.shape, row.mark) == ((4,), "kept")
    assert row._base is x


def test_copy_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    x, y = leaf * 1, leaf * 1
    x.register_hook(lambda grad: grad * 3)
    copy_hooks(x, y)
    copy_hooks(x, torch.ones(2))
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]


def test_views_of_plain_tensors_are_recorded_as_those_of_subclasses() -> None:
    def strides() -> tuple[int, ...]:
        x = torch.ones(2, requires_grad=True).clone()
        y = x.unsqueeze(0)
        x.mul_(2)
        return torch.autograd.grad(y.sum(), x)[0].stride()

    assert strides() == (1,)
    with views_recorded_as_ops():
        assert strides() == (0,)
