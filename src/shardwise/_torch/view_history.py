"""Autograd's record of a view: its base, and the calls that make it from the base.

After a write PyTorch recomputes the views of a tensor subclass from their base, to find their new gradient functions.
It repeats the calls that made them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import _force_original_view_tracking

T = TypeVar("T", bound=Tensor)

_DEFAULT = torch._C._autograd.CreationMeta.DEFAULT
_NO_GRAD_MODE = torch._C._autograd.CreationMeta.NO_GRAD_MODE
_COUNTS_AUTOGRAD = torch.__version__ >= (2, 13)  # type: ignore[operator]  # PyTorch's versions compare with tuples
"""Whether a reference of autograd to a tensor counts as one reference to its Python object."""


def views_recorded_as_ops() -> AbstractContextManager[object]:
    """Return a context in which views of plain tensors are recomputed by their calls, too, after a write."""
    return _force_original_view_tracking(True)


def views_of(base: Tensor, kinds: Collection[type[T]]) -> list[T]:
    """Return the views of a tensor that a program can reach, of these classes.

    There is no list of views, so this searches all Python objects, unless nothing but the Python object holds the
    tensor (`_use_count`): a view would hold it, too. Views that only autograd holds are left out.
    """
    if not is_held(base):
        return []
    found = [thing for thing in gc.get_objects() if type(thing) in kinds and thing._base is base]
    # Besides the program, the list, `view` and the argument of getrefcount refer to a view, and autograd once.
    return [view for view in found if sys.getrefcount(view) > 3 + (_COUNTS_AUTOGRAD and is_held(view))]


def is_held(tensor: Tensor) -> bool:
    """Return whether something in autograd holds this tensor, besides its Python object: a view of it, or a node."""
    held: bool = tensor._use_count() > 1  # type: ignore[attr-defined]
    return held


def is_recorded(view: Tensor) -> bool:
    """Return whether autograd can record writes to a view and its base.

    It refuses to do so for views that were made under `torch.no_grad()`, or by an op that makes several.
    """
    return _creation(view) == _DEFAULT


def was_made_without_grad(view: Tensor) -> bool:
    """Return whether a view was made under `torch.no_grad()`."""
    return _creation(view) == _NO_GRAD_MODE


def _creation(view: Tensor) -> object:
    creation: object = torch._C._autograd._get_creation_meta(view)
    return creation


def remade(view: Tensor, base: Tensor) -> Tensor:
    """Return the view of another base that the calls which made `view` return. Relies on `_view_func_unsafe`."""
    made: Tensor = view._view_func_unsafe(base)
    return made


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Register the gradient hooks of one tensor on another, which may need no gradient. Relies on `_backward_hooks`."""
    if target.requires_grad:
        for hook in (source._backward_hooks or {}).values():
            target.register_hook(hook)


def become(view: Tensor, other: Tensor) -> None:
    """Give a view the autograd history of another view. Its Python object stays, with its attributes.

    Relies on `_swap_tensor_impl`, which swaps the tensors behind two Python objects. Nothing else may hold either.
    """
    retains_grad = view.retains_grad
    torch._C._swap_tensor_impl(view, other)
    if retains_grad:
        view.retain_grad()
