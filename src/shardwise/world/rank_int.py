"""Numbers that differ between ranks: one integer per rank behind an ordinary `torch.SymInt`.

Where the ranks of a simulated world hold pieces of different sizes, no single integer is the size. Reporting
one rank's would make autograd divide, expand and slice by the wrong number on all others, without a word. So
such a size is a `SymInt` over a node that keeps every rank's value; arithmetic on it is done rank by rank.

>>> rows = rank_int([3, 3, 2])
>>> rows, values_of(rows * 4), rank_int([2, 2, 2])
((3 | 3 | 2), (12, 12, 8), 2)

A branch can be taken only where all ranks agree. Comparisons with 0 and 1 are the exception: they ask "is
this dim empty?", "does it broadcast?", and mean shortcuts that every op's general path covers, so where ranks
disagree they are answered as for a size that is neither. So are questions whether strides are what they would be
in some layout: where ranks disagree they are not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import WorldError

__all__ = ["RankIntNode", "RankStrideNode", "rank_int", "rank_stride", "values_of"]

_A_GENERAL_SIZE = 2  # any size that is neither empty nor broadcast
_EQUALITY = (operator.eq, operator.ne)


def rank_int(values: Sequence[int]) -> int | torch.SymInt:
    """The integer with `values[rank]` on each rank: a plain int where all agree."""
    first = values[0]
    for value in values:
        if value != first:
            return torch.SymInt(RankIntNode(tuple(values)))
    return first


def rank_stride(values: Sequence[int]) -> int | torch.SymInt:
    """As `rank_int`, for a stride."""
    number = rank_int(values)
    return number if isinstance(number, int) else torch.SymInt(RankStrideNode(tuple(values)))


def values_of(number: object) -> tuple[int, ...] | None:
    """Every rank's value of a number made by `rank_int`, or None if it is the same for all ranks.

    >>> values_of(rank_int([1, 2])), values_of(7)
    ((1, 2), None)
    """
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = number.node
        if isinstance(node, RankIntNode):
            return node.values
    return None


def _binary(op: Callable[..., Any]) -> Callable[[RankIntNode, RankIntNode], RankIntNode]:
    def method(self: RankIntNode, other: RankIntNode) -> RankIntNode:
        return RankIntNode(tuple(map(op, self.values, _matching(self, other))))

    return method


def _compare(op: Callable[..., bool]) -> Callable[[RankIntNode, RankIntNode], RankIntNode]:
    def method(self: RankIntNode, other: RankIntNode) -> RankIntNode:
        values = tuple(map(op, self.values, _matching(self, other)))
        if len(set(values)) > 1:
            if op in _EQUALITY and (isinstance(self, RankStrideNode) or isinstance(other, RankStrideNode)):
                return self.wrap_bool(op is operator.ne)
            if set(other.values) in ({0}, {1}):
                return self.wrap_bool(op(_A_GENERAL_SIZE, other.values[0]))
            if set(self.values) in ({0}, {1}):
                return self.wrap_bool(op(self.values[0], _A_GENERAL_SIZE))
        return RankIntNode(values)

    return method


def _unary(op: Callable[..., Any]) -> Callable[[RankIntNode], RankIntNode]:
    def method(self: RankIntNode) -> RankIntNode:
        return RankIntNode(tuple(map(op, self.values)))

    return method


def _matching(one: RankIntNode, other: RankIntNode) -> tuple[int, ...]:
    """The other's values. `map` would stop at the shorter one without a word."""
    if len(one.values) != len(other.values):
        raise WorldError(
            f"sizes of {len(one.values)} ranks meet sizes of {len(other.values)} ranks",
            "use tensors of one simulated world together",
        )
    return other.values


def _agreed(node: RankIntNode, what: str) -> int:
    first = node.values[0]
    if any(value != first for value in node.values):
        raise WorldError(
            f"{what} is needed, but the ranks differ: {node.str()}",
            "give every rank the same local shape, or do this part rank by rank with `map_ranks`; "
            "in place of a factory such as torch.zeros(x.shape) use x.new_zeros(x.shape)",
        )
    return first


class RankIntNode:
    """What a per-rank `SymInt`, `SymFloat` or `SymBool` holds: `values[rank]`, all of one kind.

    PyTorch calls these methods by name, from C++ and from Python; the names are its own.
    """

    __slots__ = ("values",)

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values

    # What it is.
    def is_int(self) -> bool:
        return type(self.values[0]) is int

    def is_float(self) -> bool:
        return type(self.values[0]) is float

    def is_bool(self) -> bool:
        return type(self.values[0]) is bool

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def is_constant(self) -> bool:
        """Whether PyTorch may go on with a plain number. (It knows no plain floats here.)"""
        return len(set(self.values)) == 1 and not self.is_float()

    def maybe_as_int(self) -> int | None:
        return self.values[0] if self.is_int() and len(set(self.values)) == 1 else None

    def str(self) -> str:
        return f"({' | '.join(map(str, self.values))})"

    _graph_repr = __repr__ = __str__ = str

    # Plain numbers among per-rank ones.
    def wrap_int(self, number: int) -> RankIntNode:
        return RankIntNode((number,) * len(self.values))

    wrap_bool = wrap_int

    def wrap_float(self, number: float) -> RankIntNode:
        return RankIntNode((number,) * len(self.values))  # type: ignore[arg-type]

    def clone(self) -> RankIntNode:
        return self

    # One answer for all ranks.
    def int_(self) -> int:
        return _agreed(self, "one size")

    def guard_int(self, _file: object, _line: object) -> int:
        return _agreed(self, "one size")

    def guard_float(self, _file: object, _line: object) -> float:
        return _agreed(self, "one number")

    def bool_(self) -> bool:
        return bool(_agreed(self, "one answer to a question about sizes"))

    def guard_bool(self, _file: object, _line: object) -> bool:
        return self.bool_()

    guard_size_oblivious = expect_true = guard_bool

    def guard_or_false(self, _file: object, _line: object) -> bool:
        return all(self.values)

    statically_known_true = guard_or_false

    def guard_or_true(self, _file: object, _line: object) -> bool:
        return any(self.values)

    # Arithmetic, rank by rank.
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

    eq = _compare(operator.eq)
    ne = _compare(operator.ne)
    gt = _compare(operator.gt)
    lt = _compare(operator.lt)
    le = _compare(operator.le)
    ge = _compare(operator.ge)

    neg = _unary(operator.neg)
    ceil = _unary(math.ceil)
    floor = _unary(math.floor)
    trunc = _unary(math.trunc)
    sym_not = _unary(operator.not_)
    sym_float = _unary(float)
    sym_int = _unary(int)

    def sym_ite(self, then: RankIntNode, otherwise: RankIntNode) -> RankIntNode:
        chosen = zip(self.values, _matching(self, then), _matching(self, otherwise), strict=True)
        return RankIntNode(tuple(t if yes else o for yes, t, o in chosen))

    def sym_sum(self, nodes: Sequence[RankIntNode]) -> RankIntNode:
        return RankIntNode(tuple(map(sum, zip(*(node.values for node in nodes), strict=True))))

    # Questions about a whole shape. True only where it is true on every rank: "no" takes the general path.
    def _dense(self, order: Sequence[int] | None, sizes: _Numbers, strides: _Numbers) -> RankIntNode:
        n = len(self.values)
        shapes = zip(_per_rank(sizes, n), _per_rank(strides, n), strict=True)
        return self.wrap_bool(all(_is_dense(shape, stride, order) for shape, stride in shapes))

    def is_contiguous(self, sizes: _Numbers, strides: _Numbers) -> RankIntNode:
        return self._dense(range(len(sizes))[::-1], sizes, strides)

    def is_channels_last_contiguous_2d(self, sizes: _Numbers, strides: _Numbers) -> RankIntNode:
        return self._dense((1, 3, 2, 0), sizes, strides)

    def is_channels_last_contiguous_3d(self, sizes: _Numbers, strides: _Numbers) -> RankIntNode:
        return self._dense((1, 4, 3, 2, 0), sizes, strides)

    def is_non_overlapping_and_dense(self, sizes: _Numbers, strides: _Numbers) -> RankIntNode:
        return self._dense(None, sizes, strides)

    is_channels_last_strides_2d = is_channels_last_contiguous_2d
    is_channels_last_strides_3d = is_channels_last_contiguous_3d


class RankStrideNode(RankIntNode):
    """What a per-rank stride holds."""

    __slots__ = ()


_Numbers = Sequence[object]


def _per_rank(numbers: _Numbers, n: int) -> list[tuple[Any, ...]]:
    """Sizes or strides of every rank. An entry is a node, or a number where all ranks agree."""
    columns = [number.values if isinstance(number, RankIntNode) else (number,) * n for number in numbers]
    return list(zip(*columns, strict=True)) if columns else [()] * n


def _is_dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int] | None) -> bool:
    """Whether memory is filled without gaps, dims taken innermost first in `order` (None: in any order)."""
    if order is None:
        order = sorted(range(len(shape)), key=stride.__getitem__)
    if len(order) != len(shape):
        return False
    if 0 in shape:
        return True
    expected = 1
    for dim in order:
        if shape[dim] != 1:
            if stride[dim] != expected:
                return False
            expected *= shape[dim]
    return True
