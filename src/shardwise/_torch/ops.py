"""Op overloads: `torch.ops.aten.add.Tensor` is an `OpOverload`, `torch.ops.aten.add` an `OpOverloadPacket`.

>>> schema_of(torch.ops.aten.neg.default)
aten::neg(Tensor self) -> Tensor
>>> packet_name(torch.ops.aten.add.Tensor), overload_name(torch.ops.aten.add.Tensor)
('aten::add', 'Tensor')
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from torch import FunctionSchema
from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "OpAttribute",
    "OpOverload",
    "OpOverloadPacket",
    "builtin_of",
    "overload_name",
    "packet_name",
    "schema_of",
]

T = TypeVar("T")


def builtin_of(func: OpOverload) -> Callable[..., object]:
    """Return the C++ function that an overload calls: the same op without the overload's own Python frame."""
    return func._op


def schema_of(func: OpOverload) -> FunctionSchema:
    """Return the schema of an overload: its name, arguments and results, and which of them are aliases."""
    return func._schema


def packet_name(op: OpOverload | OpOverloadPacket) -> str:
    """Return the name that all overloads of an op share, such as `aten::add`."""
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else op._schema.name


def overload_name(func: OpOverload) -> str:
    """Return the name of an overload among those of its op: `Tensor` of `aten::add.Tensor`, or `default`."""
    return func._overloadname


class OpAttribute(Generic[T]):
    """A value for each op, stored as an attribute of the op itself and computed when it is first read.

    >>> arity = OpAttribute("arity", lambda func: len(schema_of(func).arguments))
    >>> arity(torch.ops.aten.mm.default)
    2

    Overloads are Python objects that accept attributes, so the value lives as long as the op.
    """

    def __init__(self, name: str, compute: Callable[[OpOverload], T]) -> None:
        self._name = f"_shardwise_{name}"
        self._compute = compute

    def __call__(self, func: OpOverload) -> T:
        """Return the value of an op."""
        try:
            return cast(T, func.__dict__[self._name])
        except KeyError:
            return self.set(func, self._compute(func))

    def set(self, func: OpOverload, value: T) -> T:
        """Give an op this value instead of the computed one, and return it."""
        func.__dict__[self._name] = value
        return value
