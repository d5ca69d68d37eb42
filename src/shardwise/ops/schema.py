"""What follows from an op's schema: its tensor arguments, which of them it writes, and which op it is a variant of.

>>> tensor_arguments(torch.ops.aten.add.out)[2]
TensorArgument(position=3, name='out', kind='Tensor', write=True, out=True)
>>> variant_of(torch.ops.aten.add_.Tensor), family(torch.ops.aten.add_.Tensor)
('inplace', ('aten::add_', 'aten::add'))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from .._torch.ops import OpOverload, OpOverloadPacket, overload_name, packet_name, schema_of

KINDS = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor?",
    "List[Tensor]": "Tensor[]",
    "List[Optional[Tensor]]": "Tensor?[]",
    "Optional[List[Tensor]]": "Tensor[]",
}
NUMBER = re.compile(r"((Optional|List)\[)*(number|int|float|bool|complex|SymInt|SymFloat|SymBool)\]*")
DTYPES = ("dtype", "out_dtype")  # their type is int in a schema
FOREACH = "_foreach_"
ON_LISTS = (FOREACH, "_fused_", "_amp_foreach_")
"""Prefixes of the names of ops that apply another op to every tensor of a list."""


class TensorArgument(NamedTuple):
    """A tensor-like argument of an op. `kind` is Tensor, Tensor?, Tensor[] or Tensor?[].

    >>> tensor_arguments(torch.ops.aten.add.out)[2]
    TensorArgument(position=3, name='out', kind='Tensor', write=True, out=True)
    """

    position: int
    name: str
    kind: str
    write: bool
    out: bool


@lru_cache(maxsize=4096)
def tensor_arguments(func: OpOverload) -> tuple[TensorArgument, ...]:
    """Return the tensor-like arguments of an op, in the order of its schema.

    >>> [argument.name for argument in tensor_arguments(torch.ops.aten.addmm.default)]
    ['self', 'mat1', 'mat2']
    """
    found = []
    for position, argument in enumerate(schema_of(func).arguments):
        kind = KINDS.get(str(argument.type))
        if kind:
            alias = argument.alias_info
            write = alias is not None and alias.is_write
            found.append(TensorArgument(position, argument.name, kind, write, write and argument.kwarg_only))
    return tuple(found)


def operands_of(func: OpOverload) -> tuple[TensorArgument, ...]:
    """Return the tensor-like arguments that are read: all but `out=`."""
    return tuple(argument for argument in tensor_arguments(func) if not argument.out)


def overload_key(func: OpOverload) -> str:
    """Return the name of one overload, such as `aten::add.Tensor` or `aten::mm.default`."""
    return f"{packet_name(func)}.{overload_name(func)}"


def variant_of(func: OpOverload) -> str:
    """Return `functional`, `inplace`, `out` or `foreach`."""
    arguments = tensor_arguments(func)
    if _split(packet_name(func))[1].startswith(ON_LISTS) and arguments and arguments[0].kind == "Tensor[]":
        return "foreach"
    written = [argument for argument in tensor_arguments(func) if argument.write]
    if not written:
        return "functional"
    return "out" if any(argument.out for argument in written) else "inplace"


def family(func: OpOverload) -> tuple[str, ...]:
    """Return the names under which the rule of an op may be registered, nearest first."""
    name = packet_name(func)
    namespace, base = _split(name)
    names = [name]
    if base.startswith(FOREACH):
        base = base.removeprefix(FOREACH)
        names.append(f"{namespace}::{base}")
    if base.endswith("_") and not base.endswith("__"):
        names.append(f"{namespace}::{base[:-1]}")
    return tuple(names)


def overloads(name: str) -> Iterator[OpOverload]:
    """Yield all overloads of the op with this name; none if this version of PyTorch has no such op."""
    namespace, base = _split(name)
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if isinstance(packet, OpOverloadPacket):  # a namespace has methods of its own, too
        yield from (getattr(packet, overload) for overload in packet.overloads())


def has_functional_variant(func: OpOverload) -> bool:
    """Return whether an op with `out=` can be called without: `add.out` as `add`."""
    return any(variant_of(other) == "functional" for other in overloads(packet_name(func)))


def returns_view(func: OpOverload) -> bool:
    """Return whether a result is a view of an argument, which the op does not write."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(func).returns)


def _split(name: str) -> tuple[str, str]:
    namespace, _, base = name.rpartition("::")
    return namespace, base


# ---- one overload as a variant of another -----------------------------------------------------------------------

Operands = tuple[int | None, ...]
"""For each operand of the op that a rule was written for, the position of the corresponding argument in the schema of
a variant; None if that argument is a number."""


def match_operands(func: OpOverload, model: OpOverload) -> Operands | None:
    """Return which arguments of `func` correspond to the operands of `model`; None if it is not a variant of it.

    In a variant, every operand of the model has a counterpart, which may be a number; the model requires no other
    argument; and both return the same number of tensors.

    >>> match_operands(torch.ops.aten.mul.Scalar, torch.ops.aten.mul.Tensor)
    (0, None)
    >>> match_operands(torch.ops.aten.max.default, torch.ops.aten.max.other) is None
    True
    """
    wanted, given = schema_of(model).arguments, schema_of(func).arguments
    foreach = variant_of(func) == "foreach"
    if not foreach and _tensor_results(func) != _tensor_results(model):
        return None
    by_name = {argument.name: position for position, argument in enumerate(given)}
    tensors = {argument.position for argument in operands_of(func)}
    matched: set[int] = set()
    operands: list[int | None] = []
    for operand in operands_of(model):
        position = by_name.get(operand.name, operand.position)
        if position >= len(given) or position in matched:
            return None
        # The lists of foreach ops have names of their own; for other ops the names must be the same.
        if position in tensors and (foreach or given[position].name == operand.name):
            operands.append(position)
        elif _is_number(given[position]):
            operands.append(None)
        else:
            return None
        matched.add(position)
    if not tensors <= matched:
        return None
    names = {argument.name for argument in wanted}
    outs = {argument.position for argument in tensor_arguments(func) if argument.out}
    for position, argument in enumerate(given):
        if position not in matched | outs and argument.name not in names and argument.name not in DTYPES:
            return None
    if any(_is_required(argument) and argument.name not in by_name for argument in _statics(model)):
        return None
    return tuple(operands)


def _statics(func: OpOverload) -> Iterator[torch.Argument]:
    tensors = {argument.position for argument in tensor_arguments(func)}
    return (argument for position, argument in enumerate(schema_of(func).arguments) if position not in tensors)


def _is_number(argument: torch.Argument) -> bool:
    return NUMBER.fullmatch(str(argument.type)) is not None


def _is_required(argument: torch.Argument) -> bool:
    return not argument.has_default_value() and not str(argument.type).startswith("Optional")


def _tensor_results(func: OpOverload) -> int:
    return sum(str(result.type) in KINDS for result in schema_of(func).returns)
