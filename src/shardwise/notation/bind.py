"""A rule bound to shapes, and the layouts of its tensors once mesh axes are assigned to factors.

>>> bound = bind(parse("m k, k n -> m n ; linear 0 | 1"), [(4, 6), (6, 8)])
>>> bound
m=4 k=6 n=8: m k, k n -> m n ; linear 0 | 1
>>> bound.outputs[0]
BoundTensor(shape=(4, 8), dims=((0,), (2,)))
>>> shardings = ((0, bound.factor("k")),)  # mesh axis 0 shards k
>>> [sharded_layout(tensor, bound, (2,), shardings) for tensor in bound.inputs]
[Layout[4, 6@0], Layout[6@0, 8]]
>>> output_layout(bound.outputs[0], bound, 0, (2,), shardings)
Layout[4, 8] sum(0)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..sharding.layout import Coordinate, Dim, Factor, Layout, PartialAxes, Sizes, factor_range, plain_dim
from .clauses import Positions
from .frame import BindError, BoundEntry, Group, Rank, make_frame
from .kind import FactorKind
from .patterns import Pattern
from .rule import Rule
from .solve import Given, Solver, as_sizes, check_length, given_ranks

Shapes = Sequence[Any]
"""A shape for each tensor argument, None for a missing one, a list of shapes for a list of tensors."""

FactorShardings = tuple[tuple[int, int], ...]
"""(mesh axis, factor) pairs; axes that shard the same factor are ordered major to minor."""


class BoundFactor(NamedTuple):
    """A factor with its size and kind.

    An `even` factor may only be sharded into equal shards: the average of averages of unequal shards is another number.

    >>> bind(parse("m k, k n -> m n"), [(4, 6), (6, 8)]).factors[1]
    BoundFactor(name='k', size=6, kind=<FactorKind.REDUCED: 'reduced'>, even=False)
    """

    name: str
    size: int
    kind: FactorKind
    even: bool

    @property
    def must_replicate(self) -> bool:
        """Whether no mesh axis may shard it."""
        return self.kind is FactorKind.REPLICATED

    @property
    def handled_by_kernel(self) -> bool:
        """Whether sharding it needs a kernel of the op."""
        return self.kind is FactorKind.KERNEL


class BoundTensor(NamedTuple):
    """The shape of a tensor and, for each dim, its factors, major to minor; () for a dim without a factor.

    >>> bind(parse("m k, k n -> m n"), [(4, 6), (6, 8)]).outputs[0]
    BoundTensor(shape=(4, 8), dims=((0,), (2,)))
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    def has(self, factor: int) -> bool:
        """Return whether some dim has the factor."""
        return any(factor in dim for dim in self.dims)


BoundArgument = BoundTensor | tuple[BoundTensor | None, ...] | None


class Bound(NamedTuple):
    """A rule with all sizes known. A factor is an index into `factors`, an operand a position in `inputs`.

    >>> bound = bind(parse("m k, k n -> m n"), [(4, 6), (6, 8)])
    >>> bound.factor("k"), bound.factors[1].size
    (1, 6)
    """

    rule: Rule
    factors: tuple[BoundFactor, ...]
    inputs: tuple[Any, ...]  # of BoundArgument
    outputs: tuple[Any, ...]
    linear: tuple[Positions, ...]
    monotone: tuple[Positions, ...]
    antitone: tuple[Positions, ...]
    reduce: tuple[str, ...]
    size_args: tuple[tuple[str, tuple[BoundEntry, ...]], ...]
    reduced_first: frozenset[int] = frozenset()
    """Operands whose sums and averages may not pass, although the op is linear in them: it changes their dtype."""

    def factor(self, name: str) -> int:
        """Return the index of the factor with this name."""
        for i, factor in enumerate(self.factors):
            if factor.name == name:
                return i
        raise BindError(f"no factor {name} in {self!r}", f"use one of {', '.join(f.name for f in self.factors)}")

    def __repr__(self) -> str:
        return f"{' '.join(f'{factor.name}={factor.size}' for factor in self.factors)}: {self.rule!s}"


def bind(
    rule: Rule,
    inputs: Shapes,
    outputs: Shapes | None = None,
    sizes: Given | None = None,
    ragged: bool = False,
) -> Bound:
    """Return the rule bound to tensors of these shapes. Without `outputs`, their shapes are inferred.

    `sizes` gives, by name, what does not follow from the shapes: the size of a factor, the sizes of an ellipsis, or the
    value of a size argument (negative entries are ignored). `ragged` acts as the clause `ragged`.

    >>> bind(parse("m k, k n -> m n ; linear 0 | 1"), [(4, 6), (6, 8)])
    m=4 k=6 n=8: m k, k n -> m n ; linear 0 | 1
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
            # A factor of size 1 is kept: without an operand that has it, the output could not be sharded along it.
            if shape[dim] == 1 and known[factor] != 1:
                dims = (*dims[:dim], (), *dims[dim + 1 :])
        tensors.append(BoundTensor(shape, dims))
    several_sizes = solver.ragged
    factors = tuple(
        BoundFactor(name, size, FactorKind.REPLICATED if i in several_sizes else kind, even)
        for i, (name, size, (kind, even)) in enumerate(zip(frame.names, known, frame.marks, strict=True))
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
    """Return the ranks of these arguments, and add their shapes to the flat list `shapes`."""
    if len(given) != len(patterns):
        fix = f"pass {len(patterns)}, with None for a missing one"
        raise BindError(f"{len(given)} {kind} for the rule {rule!s}", fix)
    ranks: list[Rank] = []
    for pattern, shape in zip(patterns, given, strict=True):
        if shape is None:
            ranks.append(None)
        elif pattern.listed:
            shapes += [tuple(s) for s in shape if s is not None]
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


# ---- layouts, once axes shard factors -----------------------------------------------------------------------------


def sharded_layout(
    tensor: BoundTensor, bound: Bound, mesh_sizes: Sizes, shardings: FactorShardings, partial: PartialAxes = ()
) -> Layout:
    """Return the layout of a tensor when these axes shard these factors.

    >>> bound = bind(parse("m k, k n -> m n"), [(4, 6), (6, 8)])
    >>> sharded_layout(bound.inputs[0], bound, (2,), ((0, bound.factor("k")),))
    Layout[4, 6@0]
    """
    axes = _axes_of(bound, shardings)
    dims: list[Dim] = []
    for size, factors in zip(tensor.shape, tensor.dims, strict=True):
        if len(factors) == 1:
            dims.append(plain_dim(size, axes.get(factors[0], ())))
        elif not axes.keys() & factors:
            dims.append(plain_dim(size, ()))
        else:
            sizes = [bound.factors[f].size for f in factors]
            if factors[0] not in axes:  # it may be ragged
                sizes[0] = size // max(math.prod(sizes[1:]), 1)
            dims.append(tuple(Factor(n, axes.get(f, ())) for n, f in zip(sizes, factors, strict=True)))
    return Layout.make(mesh_sizes, dims, partial)


def output_partial(bound: Bound, index: int, shardings: FactorShardings) -> PartialAxes:
    """Return the axes on which an output is Partial, with the op: those that shard a factor it lacks.

    >>> bound = bind(parse("m k, k n -> m n"), [(4, 6), (6, 8)])
    >>> output_partial(bound, 0, ((0, bound.factor("k")),))
    ((0, 'sum'),)
    """
    output, op = bound.outputs[index], bound.reduce[index]
    if not output or op in ("none", "same"):
        return ()
    return tuple(sorted([(axis, op) for axis, factor in shardings if not _has(output, factor)]))


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
    if max(map(len, bound.linear), default=0) < 2:
        return frozenset()
    outputs = zip(bound.outputs, bound.reduce, strict=True)
    if not any(output and op not in ("avg", "same") and not _has(output, factor) for output, op in outputs):
        return frozenset()
    having = {i for i, operand in enumerate(bound.inputs) if _has(operand, factor)}
    lacking = [frozenset(members) - having for members in bound.linear if not having.isdisjoint(members)]
    return min(lacking, key=len, default=frozenset())


def _has(argument: BoundArgument, factor: int) -> bool:
    if isinstance(argument, BoundTensor):
        return argument.has(factor)
    members = () if argument is None else argument
    return any(member.has(factor) for member in members if isinstance(member, BoundTensor))


def output_layout(
    tensor: BoundTensor, bound: Bound, index: int, mesh_sizes: Sizes, shardings: FactorShardings
) -> Layout:
    """Return the layout of the output at `index`, or of one tensor of that output if it is a list.

    >>> bound = bind(parse("m k, k n -> m n"), [(4, 6), (6, 8)])
    >>> output_layout(bound.outputs[0], bound, 0, (2,), ((0, bound.factor("k")),))
    Layout[4, 8] sum(0)
    """
    return sharded_layout(tensor, bound, mesh_sizes, shardings, output_partial(bound, index, shardings))


def local_size(
    bound: Bound,
    name: str,
    value: int | Sequence[int],
    mesh_sizes: Sizes,
    shardings: FactorShardings,
    coordinate: Coordinate,
) -> int | list[int]:
    """Return the value of a size argument that the rank at this coordinate passes to the local op.

    >>> bound = bind(parse("(a b) -> a b ; size=(a b)"), [(24,)], sizes={"size": (4, -1)})
    >>> local_size(bound, "size", (4, -1), (2,), ((0, 0),), (1,))
    [2, 6]
    """
    axes = _axes_of(bound, shardings)

    def held(factor: int) -> int:
        start, stop = factor_range(mesh_sizes, Factor(bound.factors[factor].size, axes.get(factor, ())), coordinate)
        return stop - start

    entries, values = dict(bound.size_args)[name], as_sizes(value)
    check_length(bound.rule, name, entries, values)
    result = [
        math.prod(map(held, entry)) if isinstance(entry, tuple) else size if entry is None else entry
        for entry, size in zip(entries, values, strict=True)
    ]
    return result if isinstance(value, (list, tuple)) else result[0]


class Passing(NamedTuple):
    """Operands that may be Partial together on an axis, and the op by which the outputs are Partial then.

    >>> passes(bind(parse("a b -> a ; linear 0"), [(4, 6)]), "sum")
    (Passing(operands=(0,), op='sum'),)
    """

    operands: Positions
    op: str


def passes(bound: Bound, op: str) -> tuple[Passing, ...]:
    """Return the sets of operands that may stay Partial by this op during the call.

    >>> passes(bind(parse("a? -> a ; antitone 0"), [(4,)]), "max")
    (Passing(operands=(0,), op='min'),)
    """
    if op in ("sum", "avg"):
        allowed = (operands for operands in bound.linear if bound.reduced_first.isdisjoint(operands))
        return tuple(Passing(operands, op) for operands in allowed)
    if op not in ("max", "min"):
        return ()
    swapped = "min" if op == "max" else "max"
    found = [Passing(operands, op) for operands in bound.monotone]
    found += [Passing(operands, swapped) for operands in bound.antitone]
    # The maximum of maxima is the maximum of all elements, but the minimum of maxima is not the maximum of minima.
    own = {"max", "min"}.intersection(bound.reduce)
    return tuple(passing for passing in found if not own or {passing.op} == own)


def _axes_of(bound: Bound, shardings: FactorShardings) -> dict[int, tuple[int, ...]]:
    """Return the axes that shard each factor, major to minor. Raises if the rule does not allow it."""
    axes: dict[int, tuple[int, ...]] = {}
    factors, replicated = bound.factors, FactorKind.REPLICATED
    for axis, factor in shardings:
        if factors[factor].kind is replicated:
            name = bound.factors[factor].name
            problem = f"axis {axis} cannot shard {name}, which must be replicated in {bound!r}"
            raise BindError(problem, "shard another factor")
        axes[factor] = (*axes.get(factor, ()), axis)
    if len(dict(shardings)) != len(shardings):
        raise BindError(f"an axis occurs twice in {shardings} of {bound!r}", "let each axis shard one factor")
    return axes
