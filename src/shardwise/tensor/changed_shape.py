"""Ops that change the shape of a tensor in place: `t_`, `unsqueeze_` and others.

After a write PyTorch makes the views of a DTensor again from their base, to find their gradient functions (see
`_torch.view_history`). If the base has another shape by then, `x[0]` is another row. So these ops record for autograd
how the views that exist follow from the tensor in its new shape:

>>> row = x[0]
>>> x.t_()          # to autograd, `row` is x.t()[0] from now on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._torch.view_history import become, copy_hooks, is_held, is_recorded, remade, views_of, was_made_without_grad
from ..errors import InputError, SavedTensorError
from ..sharding.base import DTensorBase


class Geometry(NamedTuple):
    """Shape, strides and offset of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Change(NamedTuple):
    """A change of shape: the method that makes it, the one that returns a view instead, and how it is undone.

    `undo(x, before)` is the view of the changed `x` with the geometry that `x` had before.
    """

    in_place: Callable[[Tensor], Tensor]
    view: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor, Geometry], Tensor]
    name: str


def _method(name: str, undo: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the method of DTensor with this name. `undo` gets the arguments of the call, too."""
    in_place, view = getattr(Tensor, name), getattr(Tensor, name.removesuffix("_"))

    def method(self: DTensorBase, *args: object, **kwargs: object) -> Tensor:
        change = Change(
            lambda x: in_place(x, *args, **kwargs),
            lambda x: view(x, *args, **kwargs),
            lambda x, before: undo(x, before, *args, **kwargs),
            name,
        )
        if torch.compiler.is_compiling() or self.is_inference():
            return in_place(self, *args, **kwargs)
        return _change_base(self, change) if self._base is None else _change_view(self, change)

    method.__name__, method.__doc__ = name, f"As `Tensor.{name}`. Views of this tensor keep their shapes and elements."
    return method


def _change_base(tensor: DTensorBase, change: Change) -> Tensor:
    """Change a tensor that is not a view, and record its views as views of the changed tensor."""
    views = _views(tensor)
    changed = _changed_copy(tensor, change) if views else tensor
    _make_again(views, tensor)
    for view in views:
        _refuse_if_held(view, change)
    if changed.numel() < tensor.numel():
        raise InputError(
            f"{change.name} leaves out elements of {tensor._spec!r}, which has views that may need them",
            f"make a new tensor: x = x.{change.name.removesuffix('_')}(...)",
        )
    before = Geometry(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    change.in_place(tensor)
    for view in views:
        _become(view, lambda view: remade(view, change.undo(tensor, before)))
    return tensor


def _change_view(tensor: DTensorBase, change: Change) -> Tensor:
    """Change a view, and record it as a view of what it was before."""
    base: Any = tensor._base
    if _is_leaf_of_its_own(tensor, base):
        return change.in_place(tensor)
    if is_held(tensor):
        _changed_copy(tensor, change)
        _make_again([view for view in _views(base) if view is not tensor], base)
        _refuse_if_held(tensor, change)

    def changed(view: Tensor) -> Tensor:
        as_before = remade(view, base)
        copy_hooks(view, as_before)
        return change.view(as_before)

    change.in_place(tensor)
    _become(tensor, changed)
    return tensor


def _changed_copy(tensor: DTensorBase, change: Change) -> Tensor:
    """Return the changed tensor as a new one, or raise the op's error, before anything is changed."""
    if torch.is_grad_enabled() and tensor.is_leaf and tensor.requires_grad:
        change.in_place(tensor)  # raises the error of autograd
    found: Tensor = change.view(tensor.detach())
    return found


def _views(base: DTensorBase) -> list[DTensorBase]:
    found = views_of(base, {DTensorBase.concrete, type(base)})
    return [view for view in found if not _is_leaf_of_its_own(view, base)]


def _is_leaf_of_its_own(view: Tensor, base: Tensor) -> bool:
    """Return whether a view of a tensor without gradient was made to require one."""
    return view.requires_grad and not base.requires_grad


def _make_again(views: Sequence[DTensorBase], base: Tensor) -> None:
    """Replay views on their base, the last first, so that none is held by a view made from it."""
    remaining = list(views)
    while free := [view for view in remaining if not is_held(view)]:
        for view in free:
            _become(view, lambda view: remade(view, base))
        remaining = [view for view in remaining if not any(view is other for other in free)]


def _become(view: DTensorBase, make: Callable[[Tensor], Tensor]) -> None:
    """Give a view the autograd history of `make(view)`."""
    allows_writes = is_recorded(view)
    with torch.set_grad_enabled(not was_made_without_grad(view)):
        become(view, make(view))
    if not allows_writes:
        increment_version(view)  # autograd refuses to use such a view after a write, and has missed this one


def _refuse_if_held(view: DTensorBase, change: Change) -> None:
    if is_held(view):
        raise SavedTensorError(
            f"{change.name} changes the shape of {view._spec!r}, or of the tensor that it views, but a backward pass "
            "needs it as it was",
            f"run the backward pass first, or make a new tensor: x = x.{change.name.removesuffix('_')}(...)",
        )


# ---- the methods ----------------------------------------------------------------------------------------------------


def _transposed_back(x: Tensor, before: Geometry, *args: int, **kwargs: int) -> Tensor:
    return x.transpose(*args, **kwargs) if args or kwargs else x.t()


def _reshaped_back(x: Tensor, before: Geometry, *args: object, **kwargs: object) -> Tensor:
    return x.view(before.shape)


def _strided_back(x: Tensor, before: Geometry, *args: object, **kwargs: object) -> Tensor:
    return x.as_strided(*before)


class ChangingShape(DTensorBase):
    """The methods of DTensor that change its shape in place."""

    t_ = _method("t_", _transposed_back)
    transpose_ = _method("transpose_", _transposed_back)
    swapaxes_ = _method("swapaxes_", lambda x, before, *args, **kwargs: x.swapaxes(*args, **kwargs))
    swapdims_ = _method("swapdims_", lambda x, before, *args, **kwargs: x.swapdims(*args, **kwargs))
    squeeze_ = _method("squeeze_", _reshaped_back)
    unsqueeze_ = _method("unsqueeze_", _reshaped_back)
    as_strided_ = _method("as_strided_", _strided_back)
