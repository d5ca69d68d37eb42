"""A rule bound to the ranks of tensors: every dim of every tensor with its factors, before any size is known.

Frames are cached. Shapes of the same ranks share one, so a new batch size needs no new frame.

>>> frame = make_frame(parse("b?.., b?.. -> b.."), (2, 1), (2,), ())
>>> frame.names, [slot.dims for slot in frame.slots]
(('b0', 'b1'), [((0,), (1,)), ((1,),), ((0,), (1,))])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import ShardwiseError
from .clauses import Entry, Positions
from .kind import FactorKind, kind_of
from .patterns import NO_FACTOR, Atom, Dim, Pattern
from .rule import Rule

Rank = int | tuple[int | None, ...] | None
"""The number of dims of a tensor; None for a missing tensor; a tuple for a list of tensors."""

Group = int | tuple[int | None, ...] | None
"""The slot of an argument, as an index into `Frame.slots`; None for a missing one; a tuple for a list of tensors."""

BoundEntry = tuple[int, ...] | int | None
"""An entry of a size argument: the product of these factors, a fixed number, or None for any other number."""

UNKNOWN = -1


class BindError(ShardwiseError, ValueError):
    """Shapes that do not fit a rule, or a sharding that it does not allow.

    >>> bind(parse("m k, k n -> m n"), [(4, 6), (5, 8)])
    Traceback (most recent call last):
    ...
    shardwise.notation.frame.BindError: factor k has size 6 and, in operand 1, size 5 in the rule m k, k n -> m n: ...
    """


class Slot(NamedTuple):
    """One tensor: the factors of its dims, and the dims that determine the size of a factor."""

    label: str
    dims: tuple[tuple[int, ...], ...]
    plain: tuple[tuple[int, int], ...]  # (dim, factor) of each dim that is one factor
    broadcast: tuple[tuple[int, int], ...]  # (dim, factor) of each dim that is one factor, or has size 1 instead
    compound: tuple[tuple[int, tuple[int, ...]], ...]  # (dim, factors) of each dim of several factors, or of size 1


class FactorMarks(NamedTuple):
    """The kind of a factor, and whether it may only be sharded evenly."""

    kind: FactorKind
    even: bool


class Frame(NamedTuple):
    """A rule bound to ranks. Factors are numbered in the order in which they occur in the tensors."""

    names: tuple[str, ...]
    marks: tuple[FactorMarks, ...]
    slots: tuple[Slot, ...]
    inputs: tuple[Group, ...]  # for each input its slot, or the slots of its list
    outputs: tuple[Group, ...]
    linear: tuple[Positions, ...]
    monotone: tuple[Positions, ...]
    antitone: tuple[Positions, ...]
    size_args: tuple[tuple[str, tuple[BoundEntry, ...]], ...]
    fixed: tuple[tuple[int, int], ...]  # (factor, size) given by the rule itself
    compounds: bool  # whether any slot has compound dims: most rules have none, and skip solving them


class Tensor(NamedTuple):
    """A tensor with its pattern and rank; UNKNOWN is the rank of an output whose shape is inferred."""

    pattern: Pattern
    ndim: int
    label: str


@lru_cache(maxsize=8192)
def make_frame(
    rule: Rule, inputs: tuple[Rank, ...], outputs: tuple[Rank, ...] | None, given: tuple[tuple[str, int], ...]
) -> Frame:
    """Return the frame of a rule for tensors of these ranks.

    `given` holds the number of dims of ellipses that do not follow from the ranks.
    """
    tensors: list[Tensor] = []
    in_groups = _groups("operand", rule.inputs[: len(inputs)], inputs, tensors)
    inferred = tuple(None if pattern.listed else UNKNOWN for pattern in rule.outputs)
    if outputs is None and None in inferred:
        raise BindError(f"the rule {rule!s} returns a list of unknown length", "pass the shapes of the outputs")
    out_groups = _groups("output", rule.outputs, inferred if outputs is None else outputs, tensors)
    ranks = _solve_ranks(rule, tensors, dict(given))
    index: dict[str, int] = {}
    replicated: set[str] = set()
    slots = []
    for tensor in tensors:
        dims = _expand(rule, tensor, ranks)
        for atom in (atom for dim in dims for atom in dim if atom != NO_FACTOR):
            index.setdefault(atom.name, len(index))
            if atom.replicated:
                replicated.add(atom.name)
        slots.append(_slot(tensor.label, dims, index))
    present = {i for i, rank in enumerate(inputs) if rank is not None}
    return Frame(
        names=tuple(index),
        marks=_marks(rule, index, replicated, slots, out_groups),
        slots=tuple(slots),
        inputs=in_groups,
        outputs=out_groups,
        linear=_present(rule.linear, present),
        monotone=_present(rule.monotone, present),
        antitone=_present(rule.antitone, present),
        size_args=tuple((a.name, tuple(_entries(a.entries, index, ranks))) for a in rule.size_arguments),
        fixed=tuple((index[name], size) for name, size in rule.sizes if name in index),
        compounds=any(slot.compound for slot in slots),
    )


def _groups(kind: str, patterns: Sequence[Pattern], ranks: Sequence[Rank], tensors: list[Tensor]) -> tuple[Group, ...]:
    """Add the tensors of these arguments to `tensors`, and return the slot of each argument."""

    def add(pattern: Pattern, ndim: int | None, label: str) -> int | None:
        if ndim is None:
            return None
        tensors.append(Tensor(pattern, ndim, label))
        return len(tensors) - 1

    groups: list[Group] = []
    for position, (pattern, rank) in enumerate(zip(patterns, ranks, strict=True)):
        if isinstance(rank, tuple):
            groups.append(tuple(add(pattern, ndim, f"{kind} {position}[{i}]") for i, ndim in enumerate(rank)))
        else:
            groups.append(add(pattern, rank, f"{kind} {position}"))
    return tuple(groups)


# ---- ranks ------------------------------------------------------------------------------------------------------


def _solve_ranks(rule: Rule, tensors: Sequence[Tensor], ranks: dict[str, int]) -> dict[str, int]:
    """Return the number of dims of each ellipsis.

    The number follows from a tensor in which nothing broadcasts and no other ellipsis is unknown. If dims broadcast in
    all such tensors, the tensor with the most dims decides.
    """

    def surplus(tensor: Tensor, name: str) -> int | None:
        """Return the number of dims of this ellipsis by this tensor, if all else in the tensor is known."""
        many = [dim[0].name for dim in tensor.pattern.dims if len(dim) == 1 and dim[0].many]
        if tensor.ndim == UNKNOWN or name not in many or any(n != name and n not in ranks for n in many):
            return None
        others = len(tensor.pattern.dims) - len(many) + sum(ranks[n] for n in many if n != name)
        return max(0, (tensor.ndim - others) // many.count(name))

    wanted = {atom.name: None for t in tensors for dim in t.pattern.dims for atom in dim if atom.many}
    wanted.pop("_", None)
    exact = [t for t in tensors if not any(atom.broadcast for dim in t.pattern.dims for atom in dim)]
    for candidates in (exact, tensors):
        progress = True
        while progress:
            progress = False
            for name in [name for name in wanted if name not in ranks]:
                found = [rank for t in candidates if (rank := surplus(t, name)) is not None]
                if found:
                    ranks[name] = max(found)
                    progress = True
    unknown = [name for name in wanted if name not in ranks]
    if unknown:
        names = " and ".join(f"{name}.." for name in unknown)
        raise BindError(
            f"the number of dims of {names} does not follow from the shapes, in the rule {rule!s}",
            f"pass sizes={{{unknown[-1]!r}: (...)}}, or a size argument that contains them",
        )
    return ranks


def _expand(rule: Rule, tensor: Tensor, ranks: Mapping[str, int]) -> list[Dim]:
    """Return the dims of one tensor: ellipses expanded, missing broadcast dims left out."""
    dims: list[Dim] = []
    rest: int | None = None
    for dim in tensor.pattern.dims:
        if len(dim) != 1 or not dim[0].many:
            dims.append(tuple(single for atom in dim for single in _singles(atom, ranks)))
        elif dim[0].name == "_":
            rest = len(dims)
        else:
            dims += [(single,) for single in _singles(dim[0], ranks)]
    if tensor.ndim == UNKNOWN:
        if rest is not None or (NO_FACTOR,) in dims:
            raise BindError(
                f"cannot infer the shape of {tensor.label}: it has dims without a factor in the rule {rule!s}",
                "pass the shapes of the outputs",
            )
        return dims
    surplus = len(dims) - tensor.ndim
    if rest is not None and surplus < 0:
        dims[rest:rest] = [(NO_FACTOR,)] * -surplus
        return dims
    if surplus < 0 or not all(len(dim) == 1 and dim[0].broadcast for dim in dims[: max(surplus, 0)]):
        raise BindError(
            f"{tensor.label} has {tensor.ndim} dims, but its pattern is {str(tensor.pattern)!r} in the rule {rule!s}",
            f"pass a tensor of {len(dims)} dims",
        )
    return dims[surplus:]


def _singles(atom: Atom, ranks: Mapping[str, int]) -> Iterator[Atom]:
    if not atom.many:
        yield atom
        return
    for i in range(ranks.get(atom.name, 0)):
        yield atom._replace(name=f"{atom.name}{i}", many=False)


# ---- factors ----------------------------------------------------------------------------------------------------


def _slot(label: str, dims: Sequence[Dim], index: Mapping[str, int]) -> Slot:
    plain: list[tuple[int, int]] = []
    broadcast: list[tuple[int, int]] = []
    compound, numbered = [], []
    for d, dim in enumerate(dims):
        factors = tuple(index[atom.name] for atom in dim if atom != NO_FACTOR)
        numbered.append(factors)
        if len(dim) != 1:
            compound.append((d, factors))
        elif factors:
            (broadcast if dim[0].broadcast else plain).append((d, factors[0]))
    return Slot(label, tuple(numbered), tuple(plain), tuple(broadcast), tuple(compound))


def _marks(
    rule: Rule, index: Mapping[str, int], replicated: set[str], slots: Sequence[Slot], outputs: Sequence[Group]
) -> tuple[FactorMarks, ...]:
    """Return the kind of each factor: by its brackets, by the kernel clause, or by the outputs that lack it."""
    lacking: list[set[str]] = [set() for _ in index]
    for op, group in zip(rule.reduce, outputs, strict=True):
        members = group if isinstance(group, tuple) else (group,)
        for slot in members:
            if slot is not None:
                for factor in set(index.values()) - {factor for dim in slots[slot].dims for factor in dim}:
                    lacking[factor].add("same" if rule.unread else op)
    return tuple(
        FactorMarks(kind_of(name in replicated, name in rule.kernel, lacking[factor]), "avg" in lacking[factor])
        for name, factor in index.items()
    )


def _present(sets: Sequence[Positions], present: set[int]) -> tuple[Positions, ...]:
    """Return the alternatives of a clause without the operands that are missing: a missing summand changes nothing."""
    left = (tuple(i for i in members if i in present) for members in sets)
    return tuple(dict.fromkeys(members for members in left if members))


def _entries(entries: Sequence[Entry], index: Mapping[str, int], ranks: Mapping[str, int]) -> Iterator[BoundEntry]:
    for entry in entries:
        if entry is None or isinstance(entry, int):
            yield entry
            continue
        names = [single.name for atom in entry for single in _singles(atom, ranks)]
        parts = [[name] for name in names] if len(entry) == 1 and entry[0].many else [names]
        for part in parts:
            # The size of a factor that only missing tensors have is unknown: the argument is passed unchanged.
            yield tuple(index[name] for name in part) if all(name in index for name in part) else None
