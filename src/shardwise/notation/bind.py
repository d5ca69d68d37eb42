"""Binding a rule to shapes, and what a choice of cuts then means for each tensor.

>>> bound = bind(parse("m k, k n -> m n ; linear 0 | 1"), [(4, 6), (6, 8)])
>>> bound
m=4 k=6 n=8: m k, k n -> m n ; linear 0 | 1
>>> bound.outputs[0]
BoundTensor(shape=(4, 8), dims=((0,), (2,)))
>>> cuts = ((0, bound.factor("k")),)  # mesh axis 0 cuts k
>>> [cut_layout(tensor, bound, (2,), cuts) for tensor in bound.inputs]
[Layout[4, 6@0], Layout[6@0, 8]]
>>> output_layout(bound.outputs[0], bound, 0, (2,), cuts)
Layout[4, 8] sum(0)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..sharding.layout import Coordinate, Dim, Factor, Layout, PartialAxes, Sizes, factor_range
from .frame import BindError, BoundEntry, Group, Rank, make_frame
from .patterns import Pattern
from .rule import Positions, Rule
from .solve import Given, Solver, as_sizes, check_length, given_ranks

Shapes = Sequence[Any]
"""A shape for each tensor argument, None for a missing one, a list of shapes for a list of tensors."""

Cuts = tuple[tuple[int, int], ...]
"""(mesh axis, factor) pairs; axes that cut the same factor come major to minor."""


class BoundFactor(NamedTuple):
    """A factor with its size. `even`: only cuts into equal pieces are right (an average of unequal parts is not)."""

    name: str
    size: int
    whole: bool
    kernel: bool
    even: bool


class BoundTensor(NamedTuple):
    """A tensor's shape and, for each dim, its factors, major to minor; () where it carries none."""

    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    def has(self, factor: int) -> bool:
        """Whether some dim carries the factor."""
        return any(factor in dim for dim in self.dims)


BoundArgument = BoundTensor | tuple[BoundTensor | None, ...] | None


class Bound(NamedTuple):
    """A rule with all sizes known. Factors are indices into `factors`, operands positions in `inputs`."""

    rule: Rule
    factors: tuple[BoundFactor, ...]
    inputs: tuple[Any, ...]  # of BoundArgument
    outputs: tuple[Any, ...]
    linear: tuple[Positions, ...]
    monotone: tuple[Positions, ...]
    antitone: tuple[Positions, ...]
    reduce: tuple[str, ...]
    size_args: tuple[tuple[str, tuple[BoundEntry, ...]], ...]

    def factor(self, name: str) -> int:
        """The index of the factor of this name."""
        for i, factor in enumerate(self.factors):
            if factor.name == name:
                return i
        raise BindError(f"no factor {name} in {self!r}", f"it has {' '.join(f.name for f in self.factors)}")

    def __repr__(self) -> str:
        return f"{' '.join(f'{factor.name}={factor.size}' for factor in self.factors)}: {self.rule!s}"


def bind(
    rule: Rule,
    inputs: Shapes,
    outputs: Shapes | None = None,
    sizes: Given | None = None,
    ragged: bool = False,
) -> Bound:
    """The rule for tensors of these shapes. Without `outputs` their shapes are inferred, where the rule tells them.

    `sizes` adds what shapes may not tell, by name: the size of a factor, the sizes of an ellipsis, or the value of a
    size argument (a negative entry says nothing). `ragged` is the clause of that name.
    """
    shapes: list[tuple[int, ...]] = []
    patterns = rule.inputs if inputs or not rule.fits(0) else ()
    in_ranks = _ranks(rule, "operands", patterns, inputs, shapes)
    out_ranks = None if outputs is None else _ranks(rule, "outputs", rule.outputs, outputs, shapes)
    frame = make_frame(rule, in_ranks, out_ranks, given_ranks(rule, sizes) if sizes else ())
    solver = Solver(rule, frame, shapes, ragged or rule.ragged)
    known = solver.solve(sizes)
    tensors = []
    for i, slot in enumerate(frame.slots):
        if i == len(shapes):
            shapes.append(solver.infer(slot))
        dims, shape = slot.dims, shapes[i]
        for dim, factor in slot.broadcast:
            # A factor of size 1 stays: if no operand were cut with it, the output could not be either.
            if shape[dim] == 1 and known[factor] != 1:
                dims = (*dims[:dim], (), *dims[dim + 1 :])
        tensors.append(BoundTensor(shape, dims))
    uneven = solver.ragged
    factors = tuple(
        BoundFactor(name, size, whole or i in uneven, kernel, even)
        for i, (name, size, (whole, kernel, even)) in enumerate(zip(frame.names, known, frame.marks, strict=True))
    )
    return Bound(
        rule=rule,
        factors=factors,
        inputs=_gather(frame.inputs, tensors),
        outputs=_gather(frame.outputs, tensors),
        linear=frame.linear,
        monotone=frame.monotone,
        antitone=frame.antitone,
        reduce=rule.reduce,
        size_args=frame.size_args,
    )


def _ranks(
    rule: Rule, kind: str, patterns: Sequence[Pattern], given: Shapes, shapes: list[tuple[int, ...]]
) -> tuple[Rank, ...]:
    """The ranks of these arguments; their shapes are added to the flat list."""
    if len(given) != len(patterns):
        fix = f"it has {len(patterns)}; pass None for a missing one"
        raise BindError(f"{len(given)} {kind} for the rule {rule!s}", fix)
    ranks: list[Rank] = []
    for pattern, shape in zip(patterns, given, strict=True):
        if shape is None:
            ranks.append(None)
        elif pattern.listed:
            there = [tuple(s) for s in shape if s is not None]
            shapes += there
            ranks.append(tuple(None if s is None else len(s) for s in shape))
        else:
            shapes.append(tuple(shape))
            ranks.append(len(shape))
    return tuple(ranks)


def _gather(groups: Iterable[Group], tensors: Sequence[BoundTensor]) -> tuple[BoundArgument, ...]:
    found: list[BoundArgument] = []
    for group in groups:
        if isinstance(group, tuple):
            found.append(tuple(None if slot is None else tensors[slot] for slot in group))
        else:
            found.append(None if group is None else tensors[group])
    return tuple(found)


# ---- what cuts mean -----------------------------------------------------------------------------------------------


def cut_layout(tensor: BoundTensor, bound: Bound, mesh_sizes: Sizes, cuts: Cuts, partial: PartialAxes = ()) -> Layout:
    """The layout of a tensor when these axes cut these factors."""
    axes = _axes_of(bound, cuts)
    dims: list[Dim] = []
    for size, factors in zip(tensor.shape, tensor.dims, strict=True):
        if len(factors) == 1:
            dims.append((Factor(size, axes.get(factors[0], ())),))
        elif not axes.keys() & factors:
            dims.append((Factor(size, ()),))
        else:
            dims.append(tuple(Factor(bound.factors[f].size, axes.get(f, ())) for f in factors))
    return Layout.make(mesh_sizes, dims, partial)


def output_partial(bound: Bound, index: int, cuts: Cuts) -> PartialAxes:
    """The axes on which an output holds operands of a reduction, and by which op: those that cut what it lacks."""
    output, op = bound.outputs[index], bound.reduce[index]
    if not output or op in ("none", "same"):
        return ()
    return tuple(sorted((axis, op) for axis, factor in cuts if not _has(output, factor)))


def summands(bound: Bound, factor: int) -> frozenset[int]:
    """Return the operands that must be Partial, not replicated, on a mesh axis that shards this factor.

    A bias is one: it lacks the factor over which a product is summed, and the op is linear in it only together with
    an operand of that product. Replicated, it would be added once by every rank. Any one alternative of the linear
    clause that holds an operand with the factor is enough; the one with the fewest summands is used. An operand that
    is linear alone needs none, and an average needs none either: averaging a replicated operand does not change it.

    >>> bound = bind(parse("m? n?, m k, k n -> m n ; linear 0+1 | 0+2"), [(8,), (4, 6), (6, 8)])
    >>> summands(bound, bound.factor("k")), summands(bound, bound.factor("m"))
    (frozenset({0}), frozenset())
    """
    outputs = zip(bound.outputs, bound.reduce, strict=True)
    if not any(output and op not in ("avg", "same") and not _has(output, factor) for output, op in outputs):
        return frozenset()
    having = {i for i, operand in enumerate(bound.inputs) if _has(operand, factor)}
    lacking = [frozenset(members) - having for members in bound.linear if not having.isdisjoint(members)]
    return min(lacking, key=len, default=frozenset())


def _has(argument: BoundArgument, factor: int) -> bool:
    members = argument if isinstance(argument, tuple) and not isinstance(argument, BoundTensor) else (argument,)
    return any(member.has(factor) for member in members if member is not None)


def output_layout(tensor: BoundTensor, bound: Bound, index: int, mesh_sizes: Sizes, cuts: Cuts) -> Layout:
    """The layout of a tensor that is the output at `index`, or one of the list that is."""
    return cut_layout(tensor, bound, mesh_sizes, cuts, output_partial(bound, index, cuts))


def local_size(
    bound: Bound, name: str, value: int | Sequence[int], mesh_sizes: Sizes, cuts: Cuts, coordinate: Coordinate
) -> int | list[int]:
    """A size argument as the rank at this coordinate must pass it.

    >>> bound = bind(parse("(a b) -> a b ; size=(a b)"), [(24,)], sizes={"size": (4, -1)})
    >>> local_size(bound, "size", (4, -1), (2,), ((0, 0),), (1,))
    [2, 6]
    """
    axes = _axes_of(bound, cuts)
    held = []
    for i, factor in enumerate(bound.factors):
        start, stop = factor_range(mesh_sizes, Factor(factor.size, axes.get(i, ())), coordinate)
        held.append(stop - start)
    entries, values = dict(bound.size_args)[name], as_sizes(value)
    check_length(bound.rule, name, entries, values)
    result = [
        math.prod(held[f] for f in entry) if isinstance(entry, tuple) else size if entry is None else entry
        for entry, size in zip(entries, values, strict=True)
    ]
    return result[0] if isinstance(value, int) else result


class Passing(NamedTuple):
    """Operands that may be Partial together on an axis, and the op by which the outputs then are."""

    operands: Positions
    op: str


def passes(bound: Bound, op: str) -> tuple[Passing, ...]:
    """The ways in which Partial operands of this op need no reduction before the call.

    >>> passes(bind(parse("a? -> a ; antitone 0"), [(4,)]), "max")
    (Passing(operands=(0,), op='min'),)
    """
    if op in ("sum", "avg"):
        return tuple(Passing(operands, op) for operands in bound.linear)
    if op not in ("max", "min"):
        return ()
    swapped = "min" if op == "max" else "max"
    found = [Passing(operands, op) for operands in bound.monotone]
    found += [Passing(operands, swapped) for operands in bound.antitone]
    # The largest of maxima is the maximum of all, but the smallest of maxima is not the maximum of the smallest.
    own = {"max", "min"}.intersection(bound.reduce)
    return tuple(passing for passing in found if not own or {passing.op} == own)


def _axes_of(bound: Bound, cuts: Cuts) -> dict[int, tuple[int, ...]]:
    """The axes that cut each factor, major to minor; an error for a cut that the rule does not allow."""
    axes: dict[int, tuple[int, ...]] = {}
    for axis, factor in cuts:
        if bound.factors[factor].whole:
            name = bound.factors[factor].name
            raise BindError(f"axis {axis} cuts {name}, which is whole in {bound!r}", "cut another factor")
        axes[factor] = (*axes.get(factor, ()), axis)
    if len({axis for axis, _ in cuts}) != len(cuts):
        raise BindError(f"an axis cuts twice in {cuts} of {bound!r}", "one axis cuts one factor")
    return axes
