"""The ops that a function calls, recorded while it runs.

>>> [str(call.func) for call in recorded(torch.nn.functional.linear, (x, weight), {})]
['aten.t.default', 'aten.mm.default', ...]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.modes import TorchDispatchMode
from .._torch.ops import OpOverload
from .checker import plain_run

INDEFINITE = ("empty", "resize")
"""Parts of names of ops whose results are undefined."""


class Recorded(NamedTuple):
    """One call of an op, with its own copies of plain tensors."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_key(func: OpOverload, args: Any, kwargs: Any) -> Hashable:
    """Return a key that differs for calls that a rule may treat differently."""
    return func, str(pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), (args, kwargs)))


class Recorder(TorchDispatchMode):
    """Records each op that is called, and whether any of them draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Hashable, Recorded] = {}
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws |= _draws(func, kwargs)
        key = call_key(func, args, kwargs)
        if key not in self.calls:
            own = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().contiguous(), (args, kwargs))
            self.calls[key] = Recorded(func, *own)
        return func(*args, **kwargs)


def _draws(func: OpOverload, kwargs: dict[str, Any]) -> bool:
    # The checker draws its weights from a generator; attention draws for dropout, which is off.
    seeded = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    return seeded and "attention" not in func._schema.name


def recorded(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], grad: bool = True
) -> list[Recorded] | None:
    """Return the ops that a function and its backward call, once for each shape; None if it draws random numbers."""
    with Recorder() as recorder:
        plain_run(fn, args, kwargs, grad, 0)
    if recorder.draws:
        return None
    return [call for call in recorder.calls.values() if _is_definite(call)]


def _is_definite(call: Recorded) -> bool:
    tensors = [value for value in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(value, Tensor)]
    return bool(tensors) and not any(part in call.func._schema.name for part in INDEFINITE)
