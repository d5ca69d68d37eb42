"""Find ops by their names, or by the Python functions that call them.

>>> find_op("mm"), find_op(torch.Tensor.add_), find_op("aten::sum.dim_IntList")
(<OpOverload(op='aten.mm', overload='default')>, <OpOverload(op='aten.add_', overload='Tensor')>, ...)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.fake_tensors import on_meta
from .._torch.modes import TorchDispatchMode
from .._torch.ops import OpOverload, OpOverloadPacket, overload_name, packet_name
from .._torch.schemas import is_dispatched
from ..notation.patterns import RuleError
from .call import Args, Kwargs
from .op import Function
from .registry import resolve
from .schema import operands_of, overload_key, overloads, variant_of

AnyOp = OpOverload | OpOverloadPacket | str | Function


def find_op(op: AnyOp) -> OpOverload:
    """Return the overload that `op` names; of several, the first that takes tensors and is no `out=` variant."""
    if isinstance(op, OpOverload) and is_dispatched(op):
        return op
    name, overload = _names(op)
    found = list(filter(is_dispatched, overloads(name)))
    if overload:
        found = [func for func in found if overload_name(func) == overload]
    if not found and isinstance(op, (OpOverload, OpOverloadPacket)):
        raise RuleError(f"{op} is a function of TorchScript alone", "pass an op that takes tensors, or its name")
    if not found and callable(op):
        raise RuleError(
            f"{getattr(op, '__name__', op)} is not an op", "pass example arguments, too, to see the ops that it calls"
        )
    if not found:
        raise RuleError(f"no op is called {op!r}", "pass a name such as aten::add, an overload, or a function of torch")
    return min(found, key=lambda func: (not operands_of(func), variant_of(func) == "out", _by_dim_names(func)))


def _by_dim_names(func: OpOverload) -> bool:
    return "name" in overload_name(func).lower()


_PLACES = ("torch.ops.", "torch.nn.functional.", "torch.Tensor.", "torch.")
"""Where the functions that call ops are found in PyTorch, as in `torch.add`."""


def _names(op: AnyOp) -> tuple[str, str]:
    """Return the name of an op with its namespace, and the name of its overload, which may be empty."""
    if isinstance(op, OpOverload):
        return packet_name(op), overload_name(op)
    if isinstance(op, OpOverloadPacket):
        return packet_name(op), ""
    text = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    place = next((place for place in _PLACES if text.startswith(place)), "")
    space, colons, rest = text.removeprefix(place).partition("::")
    if colons:
        name, _, overload = rest.partition(".")
        return f"{space}::{name}", overload
    first, _, rest = space.partition(".")
    if any(overloads(f"aten::{first}")):
        return f"aten::{first}", rest
    name, _, overload = rest.partition(".")
    return f"{first}::{name}" if name else f"aten::{first}", overload


class _Recorder(TorchDispatchMode):
    """Records the ops that a function calls, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, Args, Kwargs]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def called_with(op: AnyOp, args: Args, kwargs: Kwargs) -> list[tuple[OpOverload, Args, Kwargs]]:
    """Return the ops on tensors that a call runs, each once, with their arguments.

    These are the op itself, or the ops that a composite function calls, found by running it on meta tensors. `linear`
    and its like, which PyTorch decomposes but shardwise runs as one op, have Python code in their record.
    """
    func = find_op(op) if isinstance(op, OpOverload) or _is_known(op) else None
    if func is not None and resolve(func).python is not None:
        return [(func, args, kwargs)]
    given, named = pytree.tree_map_only(Tensor, on_meta, (args, kwargs))
    with _Recorder() as recorder, torch.no_grad():
        try:
            _callable(op)(*given, **named)
        except NotImplementedError:  # of an op whose result depends on data
            if not recorder.calls:
                raise
    once = {overload_key(each[0]): each for each in reversed(recorder.calls) if operands_of(each[0])}
    return list(once.values())[::-1]


def _is_known(op: AnyOp) -> bool:
    return any(map(is_dispatched, overloads(_names(op)[0])))


def _callable(op: AnyOp) -> Function:
    if not isinstance(op, str):
        return op
    name, overload = _names(op)
    if overload:
        return find_op(op)
    space, _, name = name.partition("::")
    packet: Function = getattr(getattr(torch.ops, space), name)
    return packet
