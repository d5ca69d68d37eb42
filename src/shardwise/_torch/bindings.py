"""The fastest callable of an op: a Python binding of PyTorch, if it calls just this op.

An overload parses its arguments by its schema, a binding (`torch.add`, `Tensor.view`) in generated code, which saves up
to two microseconds a call. Which op a binding calls depends on the types of its arguments, so it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import DispatchKey

from . import pytree
from .fake_tensors import on_meta
from .modes import TorchDispatchMode, without_modes
from .ops import OpOverload

_PLACES = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
_NAMES = {"_to_copy": "to"}


def binding(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[..., object]:
    """Return the fastest callable of this op for arguments of these types.

    >>> binding(torch.ops.aten.t.default, (torch.ones(2, 3),), {})
    <built-in method t of type object at ...>
    """
    return _choose(func, args, kwargs)


def types_key(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return a key of what the choice of a binding depends on: the types of arguments, and the values of kwargs."""
    return tuple(map(_kind, args)), tuple((name, str(value)) for name, value in kwargs.items())


def _kind(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return (type(value), value.dtype) if isinstance(value, Tensor) else type(value)


def _choose(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[..., object]:
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "aten" and not func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        for place in _PLACES:
            candidate = getattr(place, _NAMES.get(name, name), None)
            if candidate is not None and _calls(candidate, func, args, kwargs):
                return candidate
    return func._op


def _calls(
    candidate: Callable[..., object], func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    """Return whether a binding calls just this op, with just these arguments."""
    given = pytree.tree_map_only(Tensor, on_meta, (list(args), kwargs))
    with without_modes(), torch.no_grad(), _Recorder() as recorder:
        try:
            candidate(*given[0], **given[1])
        except Exception:
            return False
    return len(recorder.calls) == 1 and _same(recorder.calls[0], (func, *given))


class _Recorder(TorchDispatchMode):
    """Records the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, list[object], dict[str, object]]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.calls.append((func, list(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


def _same(called: tuple[object, ...], wanted: tuple[object, ...]) -> bool:
    """Return whether two calls are the same: identical tensors, equal values."""
    one, its_tree = pytree.tree_flatten(called)
    other, tree = pytree.tree_flatten(wanted)
    return its_tree == tree and all(a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(one, other))  # noqa: B905
