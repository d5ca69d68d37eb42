"""Symbolic integers: a `torch.SymInt` that holds a node of ours, whose methods PyTorch calls for all arithmetic.

>>> class Doubled(NumberNode): ...
>>> rows = make_symint(Doubled(3))
>>> node_of(rows + 1)            # Doubled.combine(operator.add, node of 1)

`torch.SymInt`, `SymFloat` and `SymBool` accept any Python object as their node. PyTorch, in C++ and in Python, calls
the node's methods by name; all these names are in this file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Self

import torch

__all__ = ["NumberNode", "SizeOrNode", "is_symbol", "make_symint", "node_of"]

Number = int | float | bool


def make_symint(node: NumberNode) -> torch.SymInt:
    """Return the symbolic integer with this node."""
    return torch.SymInt(node)


def node_of(number: object) -> object:
    """Return the node of a symbolic number; None for anything else."""
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number.node
    return None


def is_symbol(value: object) -> bool:
    """Return whether this is a symbolic size of the compiler."""
    return isinstance(value, torch.SymInt) and not isinstance(value.node, NumberNode)


def _binary(operation: Callable[..., Number]) -> Callable[[NumberNode, NumberNode], NumberNode]:
    return lambda self, other: self.combine(operation, other)


def _unary(operation: Callable[..., Number]) -> Callable[[NumberNode], NumberNode]:
    return lambda self: self.apply(operation)


def _comparison(operation: Callable[..., bool]) -> Callable[[NumberNode, NumberNode], NumberNode]:
    return lambda self, other: self.compare(operation, other)


class NumberNode:
    """Base class of nodes: maps the methods that PyTorch calls to the few that a subclass defines."""

    __slots__ = ()

    # ---- a subclass defines these ---------------------------------------------------------------------------------

    def is_int(self) -> bool:
        """Return whether this is the node of a `SymInt`."""
        raise NotImplementedError

    def is_float(self) -> bool:
        """Return whether this is the node of a `SymFloat`."""
        raise NotImplementedError

    def is_bool(self) -> bool:
        """Return whether this is the node of a `SymBool`."""
        raise NotImplementedError

    def is_constant(self) -> bool:
        """Return whether PyTorch may compute with a plain number in the place of this one."""
        raise NotImplementedError

    def maybe_as_int(self) -> int | None:
        """Return the plain integer that this one equals; None if it does not."""
        raise NotImplementedError

    def wrap_int(self, number: int) -> NumberNode:
        """Return the node of a plain number that is combined with this one."""
        raise NotImplementedError

    def apply(self, operation: Callable[..., Number]) -> NumberNode:
        """Return the node of `operation(self)`."""
        raise NotImplementedError

    def combine(self, operation: Callable[..., Number], other: NumberNode) -> NumberNode:
        """Return the node of `operation(self, other)`."""
        raise NotImplementedError

    def compare(self, operation: Callable[..., bool], other: NumberNode) -> NumberNode:
        """Return the node of the comparison `operation(self, other)`."""
        raise NotImplementedError

    def value(self, what: str) -> Number:
        """Return the plain number that the caller needs as `what`; raise an error if there is none."""
        raise NotImplementedError

    def always(self) -> bool:
        """Return whether a truth value is known to be true."""
        raise NotImplementedError

    def possibly(self) -> bool:
        """Return whether a truth value is not known to be false."""
        raise NotImplementedError

    def is_dense(self, order: Sequence[int] | None, sizes: Sequence[SizeOrNode], strides: Sequence[SizeOrNode]) -> bool:
        """Return whether a tensor fills its memory without gaps, dims taken innermost first in `order`.

        None stands for any order.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the number as text."""
        raise NotImplementedError

    # ---- PyTorch calls these --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self.__str__()

    def _graph_repr(self) -> str:
        return self.__str__()

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def clone(self) -> Self:
        return self

    def wrap_bool(self, number: bool) -> NumberNode:
        return self.wrap_int(number)

    def wrap_float(self, number: float) -> NumberNode:
        return self.wrap_int(number)  # type: ignore[arg-type]

    def int_(self) -> int:
        return int(self.value("one size"))

    def guard_int(self, _file: object, _line: object) -> int:
        return self.int_()

    def guard_float(self, _file: object, _line: object) -> float:
        return self.value("one number")

    def bool_(self) -> bool:
        return bool(self.value("one answer to a question about sizes"))

    def guard_bool(self, _file: object, _line: object) -> bool:
        return self.bool_()

    guard_size_oblivious = expect_true = guard_bool

    def guard_or_false(self, _file: object, _line: object) -> bool:
        return self.always()

    statically_known_true = guard_or_false

    def guard_or_true(self, _file: object, _line: object) -> bool:
        return self.possibly()

    add = _binary(operator.add)
    sub = _binary(operator.sub)
    mul = _binary(operator.mul)
    mod = _binary(operator.mod)
    floordiv = int_floordiv = _binary(operator.floordiv)
    truediv = int_truediv = float_truediv = _binary(operator.truediv)
    pow = pow_by_natural = float_pow = _binary(operator.pow)
    sym_min = _binary(min)
    sym_max = _binary(max)
    sym_and = and_ = _binary(lambda a, b: a and b)
    sym_or = or_ = _binary(lambda a, b: a or b)

    eq = _comparison(operator.eq)
    ne = _comparison(operator.ne)
    gt = _comparison(operator.gt)
    lt = _comparison(operator.lt)
    le = _comparison(operator.le)
    ge = _comparison(operator.ge)

    neg = _unary(operator.neg)
    ceil = _unary(math.ceil)
    floor = _unary(math.floor)
    trunc = _unary(math.trunc)
    sym_not = _unary(operator.not_)
    sym_float = _unary(float)
    sym_int = _unary(int)

    def sym_sum(self, nodes: Sequence[NumberNode]) -> NumberNode:
        return reduce(lambda total, node: total.combine(operator.add, node), nodes)

    def is_contiguous(self, sizes: Sequence[SizeOrNode], strides: Sequence[SizeOrNode]) -> NumberNode:
        return self.wrap_bool(self.is_dense(range(len(sizes))[::-1], sizes, strides))

    def is_channels_last_contiguous_2d(self, sizes: Sequence[SizeOrNode], strides: Sequence[SizeOrNode]) -> NumberNode:
        return self.wrap_bool(self.is_dense((1, 3, 2, 0), sizes, strides))

    def is_channels_last_contiguous_3d(self, sizes: Sequence[SizeOrNode], strides: Sequence[SizeOrNode]) -> NumberNode:
        return self.wrap_bool(self.is_dense((1, 4, 3, 2, 0), sizes, strides))

    def is_non_overlapping_and_dense(self, sizes: Sequence[SizeOrNode], strides: Sequence[SizeOrNode]) -> NumberNode:
        return self.wrap_bool(self.is_dense(None, sizes, strides))

    is_channels_last_strides_2d = is_channels_last_contiguous_2d
    is_channels_last_strides_3d = is_channels_last_contiguous_3d

    def str(self) -> str:  # last: it hides the type of the same name
        return self.__str__()


SizeOrNode = int | NumberNode
"""An entry of the sizes or strides that PyTorch passes to a node: a node where it is symbolic."""
