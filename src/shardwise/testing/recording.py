"""The ops that a function calls, recorded while it runs.

>>> [str(call.func) for call in recorded(torch.nn.functional.linear, (x, weight), {})]
['aten.t.default', 'aten.mm.default', ...]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.modes import OwnMode
from .._torch.ops import OpOverload, packet_name
from ..dispatch.bind_call import Place
from .checker import Sample, tensors_in

INDEFINITE = ("empty", "resize")
"""Parts of names of ops whose results are undefined."""


class Recorded(NamedTuple):
    """One call of an op, with its own copies of plain tensors."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def at(self, place: Place) -> object:
        """Return the argument at this place, or the element of a list."""
        where, index = place
        value = self.args[where] if isinstance(where, int) else self.kwargs[where]
        return value[index] if index is not None and isinstance(value, (list, tuple)) else value

    def replaced(self, change: Callable[[Place, object], object]) -> tuple[list[object], dict[str, object]]:
        """Return the arguments with every value, also in lists, replaced by `change(place, value)`."""

        def one(where: int | str, value: object) -> object:
            if isinstance(value, (list, tuple)):
                return [change((where, i), element) for i, element in enumerate(value)]
            return change((where, None), value)

        args = [one(i, value) for i, value in enumerate(self.args)]
        return args, {name: one(name, value) for name, value in self.kwargs.items()}


def call_key(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Hashable:
    """Return a key that differs for calls that a rule may treat differently."""
    return func, str(pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), (args, kwargs)))


class Recorder(OwnMode):
    """Records each op that is called, and whether any of them draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Hashable, Recorded] = {}
        self.draws = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        self.draws |= _draws(func, kwargs)
        key = call_key(func, args, kwargs)
        if key not in self.calls:
            own = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().contiguous(), (args, kwargs))
            self.calls[key] = Recorded(func, *own)
        return func(*args, **kwargs)


def _draws(func: OpOverload, kwargs: Mapping[str, object]) -> bool:
    # The checker draws its weights from a generator; attention draws for dropout, which is off.
    seeded = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    return seeded and "attention" not in packet_name(func)


def recorded(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], grad: bool = True
) -> list[Recorded] | None:
    """Return the ops that a function and its backward call, once for each shape; None if it draws random numbers."""
    with Recorder() as recorder:
        Sample(fn, args, kwargs, grad).plain()
    if recorder.draws:
        return None
    return [call for call in recorder.calls.values() if _is_definite(call)]


def _is_definite(call: Recorded) -> bool:
    """Return whether a call has a defined result to compare.

    Calls on meta tensors have none: PyTorch makes them to infer the shape of a product with zeros that have no memory,
    as autograd makes them for the derivative of `sgn`.
    """
    tensors = tensors_in(call)
    defined = not any(part in packet_name(call.func) for part in INDEFINITE)
    return bool(tensors) and defined and not any(tensor.is_meta for tensor in tensors)
