"""Sizes that differ between ranks: one integer per rank behind an ordinary `torch.SymInt`.

Where the ranks of a simulated world hold shards of different sizes, no single integer is the size. With rank 0's size,
autograd would silently divide, expand and slice by the wrong number on all other ranks. So such a size is a `SymInt`
whose node holds the value of every rank, and arithmetic on it is done rank by rank.

>>> rows = rank_int([3, 3, 2])
>>> rows, values_of(rows * 4), rank_int([2, 2, 2])
((3 | 3 | 2), (12, 12, 8), 2)

A branch can be taken only where all ranks agree, with two exceptions. Comparisons with 0 and 1 ask "is this dim empty?"
and "does it broadcast?". They select shortcuts for special cases, and the general case is always correct; so where
ranks disagree the answer is that of a size which is neither 0 nor 1. Likewise, strides that are equal on some ranks
only are reported as different.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from .._torch.symint import NumberNode, SizeOrNode, make_symint, node_of
from ..errors import WorldError

__all__ = ["RankIntNode", "RankStrideNode", "rank_int", "rank_stride", "refuse_differing", "values_of"]

_GENERAL_SIZE = 2  # any size that is neither empty nor broadcast
_EQUALITY = (operator.eq, operator.ne)


def rank_int(values: Sequence[int]) -> int | torch.SymInt:
    """Return the integer that is `values[rank]` on each rank: a plain int where all are equal.

    >>> rows = rank_int([3, 3, 2])
    >>> rows, rows * 4, rank_int([2, 2, 2])
    ((3 | 3 | 2), (12 | 12 | 8), 2)
    """
    first = values[0]
    for value in values:
        if value != first:
            return make_symint(RankIntNode(tuple(values)))
    return first


def rank_stride(values: Sequence[int]) -> int | torch.SymInt:
    """Return the stride that is `values[rank]` on each rank; see `rank_int`."""
    number = rank_int(values)
    return number if isinstance(number, int) else make_symint(RankStrideNode(tuple(values)))


def values_of(number: object) -> tuple[int, ...] | None:
    """Return the value of a per-rank number on each rank, or None if `number` is not per rank.

    >>> values_of(rank_int([1, 2])), values_of(7)
    ((1, 2), None)
    """
    node = node_of(number)
    return node.values if isinstance(node, RankIntNode) else None


def refuse_differing(what: str, numbers: Iterable[object]) -> None:
    """Raise an error if a number that a global tensor has once, a size or an index, differs between simulated ranks."""
    for number in numbers:
        if values_of(number) is not None:
            raise WorldError(
                f"{what} differs between simulated ranks: {number}",
                "compute it from the global shape, x.shape, or work on local tensors: x.to_local(), local_map",
            )


class RankIntNode(NumberNode):
    """The node of a per-rank `SymInt`, `SymFloat` or `SymBool`: `values[rank]`, all ints, all floats or all bools."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values

    def is_int(self) -> bool:
        return type(self.values[0]) is int

    def is_float(self) -> bool:
        return type(self.values[0]) is float

    def is_bool(self) -> bool:
        return type(self.values[0]) is bool

    def is_constant(self) -> bool:
        # PyTorch does not accept a plain float in the place of a SymFloat.
        return len(set(self.values)) == 1 and not self.is_float()

    def maybe_as_int(self) -> int | None:
        return self.values[0] if self.is_int() and len(set(self.values)) == 1 else None

    def wrap_int(self, number: int) -> RankIntNode:
        return RankIntNode((number,) * len(self.values))

    def apply(self, operation: Callable[..., Any]) -> RankIntNode:
        return RankIntNode(tuple(map(operation, self.values)))

    def combine(self, operation: Callable[..., Any], other: NumberNode) -> RankIntNode:
        return RankIntNode(tuple(map(operation, self.values, self._values_of(other))))

    def compare(self, operation: Callable[..., bool], other: NumberNode) -> RankIntNode:
        others = self._values_of(other)
        answers = tuple(map(operation, self.values, others))
        if len(set(answers)) > 1:
            if operation in _EQUALITY and (isinstance(self, RankStrideNode) or isinstance(other, RankStrideNode)):
                return self.wrap_int(operation is operator.ne)
            if set(others) in ({0}, {1}):
                return self.wrap_int(operation(_GENERAL_SIZE, others[0]))
            if set(self.values) in ({0}, {1}):
                return self.wrap_int(operation(self.values[0], _GENERAL_SIZE))
        return RankIntNode(answers)

    def _values_of(self, other: NumberNode) -> tuple[int, ...]:
        assert isinstance(other, RankIntNode), "a SymInt's nodes are of one class"
        values = other.values
        if len(values) != len(self.values):
            raise WorldError(
                f"an operation got sizes of {len(self.values)} ranks and sizes of {len(values)} ranks",
                "use tensors of one simulated world together",
            )
        return values

    def value(self, what: str) -> int:
        first = self.values[0]
        if any(value != first for value in self.values):
            raise WorldError(
                f"{what} is needed, but the ranks differ: {self}",
                "give every rank the same local shape, or compute this rank by rank with `map_ranks`; "
                "instead of a factory such as torch.zeros(x.shape) use x.new_zeros(x.shape)",
            )
        return first

    def always(self) -> bool:
        return all(self.values)

    def possibly(self) -> bool:
        return any(self.values)

    def is_dense(self, order: Sequence[int] | None, sizes: Sequence[SizeOrNode], strides: Sequence[SizeOrNode]) -> bool:
        # True only where it is true on every rank: "no" selects the general path of an op.
        n = len(self.values)
        shapes = zip(_by_rank(sizes, n), _by_rank(strides, n), strict=True)
        return all(_is_dense(shape, stride, order) for shape, stride in shapes)

    def __str__(self) -> str:
        return f"({' | '.join(map(str, self.values))})"


class RankStrideNode(RankIntNode):
    """The node of a per-rank stride."""

    __slots__ = ()


def _by_rank(numbers: Sequence[SizeOrNode], n: int) -> list[tuple[int, ...]]:
    """Return the sizes or strides of each rank."""
    columns = [number.values if isinstance(number, RankIntNode) else (number,) * n for number in numbers]
    return cast(list[tuple[int, ...]], list(zip(*columns, strict=True)) if columns else [()] * n)


def _is_dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int] | None) -> bool:
    """Return whether a tensor fills its memory without gaps, dims taken innermost first in `order`.

    None stands for any order.
    """
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
