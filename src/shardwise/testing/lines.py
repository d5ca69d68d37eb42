"""Convert split dims to lines of the rule table: as few lines as possible that describe every call that was tried.

>>> lines_of("aten::ormqr.default", groups)
[Line(op='aten::ormqr.default', ranks=(), arguments=(), rule='b.. _ _, b.. _, b.. _ _ -> b.. _ _')]

For calls of one kind the line is written dim by dim. A line is used for other kinds, too, if it allows exactly the
splits that were found for them: a run of dims becomes `b..`, or the line gets conditions on ranks or arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._torch.ops import schema_of
from ..notation import parse
from ..ops.generated import Line, as_literal, ranks_of
from ..ops.schema import KINDS, operands_of
from .line_check import ranks_were_tried, says
from .probe_call import ProbeCall
from .split_dims import SplitDims

Tokens = list[list[str]]
"""For each operand or result, the words of its pattern."""


OF_NEW_TENSORS = ("dtype", "out_dtype", "layout", "device", "pin_memory", "memory_format")
"""Arguments that choose the kind of the result; some of them have type int in a schema."""


class Group(NamedTuple):
    """Calls of one kind (operands of the same ranks, equal other arguments), and the splits that all of them allow."""

    calls: list[ProbeCall]
    splits: list[SplitDims]
    ranks: tuple[str, ...]
    statics: dict[str, object]


def kind_of(setup: ProbeCall) -> tuple[tuple[str, ...], dict[str, object]]:
    """Return the ranks of a call's operands, and the other arguments that a rule may read."""
    operands = {argument.name for argument in operands_of(setup.func)}
    statics = {}
    for argument in schema_of(setup.func).arguments:
        tensor = argument.name in operands or str(argument.type) in KINDS
        if not tensor and argument.name not in OF_NEW_TENSORS and _is_readable(str(argument.type)):
            value = setup.arguments.get(argument.name, argument.default_value)
            statics[argument.name] = as_literal(value)
    return ranks_of(setup.arguments.get(name) for name in setup.names), statics


def _is_readable(kind: str) -> bool:
    # A rule may not read floating-point numbers.
    return any(word in kind for word in ("int", "bool", "str", "SymInt")) and "float" not in kind


# ---- one kind -------------------------------------------------------------------------------------------------------


def tokens(group: Group) -> tuple[Tokens, Tokens, list[str]]:
    """Return the words of each operand and of each result, and the clauses."""
    setup = group.calls[0]
    operands: Tokens = []
    for operand in range(len(setup.names)):
        ranks = {t.dim() for t in setup.tensors(operand)}
        operands.append(["_"] * ranks.pop() if len(ranks) == 1 else ["_.."])
    results: Tokens = []
    for tensors in setup.run() or []:
        ranks = {t.dim() for t in tensors}
        results.append(["_"] * ranks.pop() if len(ranks) == 1 else ["_.."])
    reduce = ["sum"] * len(results)
    sizes: dict[str, list[str]] = {}
    names = iter("abcdefghijklmnopqrstuvwxyz")
    for split in sorted(group.splits, key=lambda split: split.dims):
        name = next(names)
        for operand, dim in split.dims:
            operands[operand][dim] = name
        for result, (way, dim) in enumerate(split.ways):
            if way == "concat":
                results[result][dim] = name
            else:
                reduce[result] = way
        for argument, index in split.sizes:
            value = setup.arguments[argument]
            entries = sizes.setdefault(argument, ["_"] * (1 if index is None else len(value)))
            entries[index or 0] = name
    clauses = [f"{name}=({' '.join(entries)})" for name, entries in sorted(sizes.items())]
    if any(op != "sum" for op in reduce):
        clauses.insert(0, f"reduce {', '.join(reduce)}")
    return operands, results, clauses


def reductions_agree(splits: Sequence[SplitDims]) -> bool:
    """Return whether each result is reduced by one op: a rule has one for each result."""
    for ways in zip(*(split.ways for split in splits), strict=True):
        if len({way for way, _ in ways if way != "concat"}) > 1:
            return False
    return True


def _written(setup: ProbeCall, operands: Tokens, results: Tokens, clauses: Sequence[str]) -> str:
    listed = [operand.kind.endswith("[]") for operand in operands_of(setup.func)]
    left = [f"{{{' '.join(words)}}}" if many else " ".join(words) for words, many in zip(operands, listed, strict=True)]
    many = [str(result.type) == "List[Tensor]" for result in schema_of(setup.func).returns] or [False] * len(results)
    right = [f"{{{' '.join(words)}}}" if m else " ".join(words) for words, m in zip(results, many, strict=True)]
    return str(parse(" ; ".join([f"{', '.join(left)} -> {', '.join(right)}", *clauses])))


def candidates(group: Group) -> Iterator[str]:
    """Yield lines for a kind of calls: the most general first, the one written dim by dim later."""
    operands, results, clauses = tokens(group)
    setup = group.calls[0]
    absent = [i for i in range(len(operands)) if not setup.tensors(i)]
    for operand in absent:
        operands[operand] = ["_.."]
    written: list[tuple[Tokens, Tokens]] = []
    sized = {word for clause in clauses for word in clause.partition("=")[2].strip("()").split()}
    runs = sorted(_runs([*operands, *results]), key=len, reverse=True)
    runs = [run for run in runs if sized.isdisjoint(run)]
    for run in runs:
        both = [[_replaced(words, run) for words in side] for side in (operands, results)]
        written.append((both[0], both[1]))
    written.append((operands, results))
    for left, right in written:
        yield _written(setup, left, right, clauses)
        yield _written(setup, [_shortened(words) for words in left], [_shortened(words) for words in right], clauses)
    if len(operands) > 1 and not clauses:  # elementwise, with broadcasting
        yield f"{', '.join(['x?..'] * len(operands))} -> {', '.join(['x..'] * len(results))}"


def _runs(patterns: Tokens) -> list[tuple[str, ...]]:
    """Return runs of factors that occur together, in this order, wherever one of them occurs."""
    found: dict[tuple[str, ...], None] = {}  # in the order in which they occur
    for words in patterns:
        for start, stop in itertools.combinations(range(len(words) + 1), 2):
            run = tuple(words[start:stop])
            if all(len(word) == 1 and word != "_" for word in run) and all(_holds(other, run) for other in patterns):
                found[run] = None
    return list(found)


def _holds(words: list[str], run: tuple[str, ...]) -> bool:
    present = [word for word in words if word in run]
    return not present or any(tuple(words[i : i + len(run)]) == run for i in range(len(words)))


def _replaced(words: list[str], run: tuple[str, ...]) -> list[str]:
    if run[0] not in words:
        return words
    start = words.index(run[0])
    return [*words[:start], "x..", *words[start + len(run) :]]


def _shortened(words: list[str]) -> list[str]:
    """Replace one run of dims without a factor by an ellipsis."""
    if "_" not in words or "_.." in words:
        return words
    start = words.index("_")
    stop = next((i for i in range(start, len(words)) if words[i] != "_"), len(words))
    return [*words[:start], "_..", *words[stop:]]


# ---- all kinds ------------------------------------------------------------------------------------------------------


def lines_of(op: str, groups: Sequence[Group]) -> list[Line]:
    """Return the lines of an op, with as few conditions as possible; none if nothing can be sharded."""
    names = sorted({name for group in groups for name in group.statics})
    conditions = [
        (ranked, chosen)
        for count in range(len(names) + 1)
        for chosen in itertools.combinations(names, count)
        for ranked in (False, True)
    ]
    for ranked, chosen in conditions:
        lines = _with_conditions(op, groups, ranked, chosen)
        if lines is not None:
            return lines
    return []


def _is_varied(name: str, groups: Sequence[Group]) -> bool:
    """Return whether enough values of an argument were tried to assume that others change nothing.

    Of a flag both values; of a dim every one, for every rank; of a size that is split any; of other arguments three.
    """
    values = [group.statics[name] for group in groups]
    if all(any(size == name for split in group.splits for size, _ in split.sizes) for group in groups):
        return True
    if name.startswith(("dim", "axis")):
        seen: dict[int, set[int]] = {}
        for group, value in zip(groups, values, strict=True):
            ndim = max((t.dim() for t in group.calls[0].tensors(0)), default=0)
            given = value if isinstance(value, list) else [value]
            dims = [dim % max(ndim, 1) for dim in given if type(dim) is int]
            if len(dims) < len(given):
                return False
            seen.setdefault(ndim, set()).update(dims)
        return all(len(dims) == ndim for ndim, dims in seen.items())
    different = {repr(value) for value in values}
    return len(different) > (1 if all(isinstance(value, bool) for value in values) else 2)


def _with_conditions(op: str, groups: Sequence[Group], ranked: bool, names: tuple[str, ...]) -> list[Line] | None:
    """Return lines with conditions on these arguments; None if such lines would not fit all calls that were tried."""
    others = {name for group in groups for name in group.statics} - set(names)
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(repr((group.ranks if ranked else (), [group.statics[n] for n in names])), []).append(group)
    lines = []
    for part in parts.values():
        if not any(group.splits for group in part):
            continue
        rule = _of_all(part) if all(_is_varied(name, part) for name in others) else None
        if rule is None:
            return None
        first = part[0]
        lines.append(Line(op, first.ranks if ranked else (), tuple((n, first.statics[n]) for n in names), rule))
    return sorted(lines, key=str)


def _of_all(groups: Sequence[Group]) -> str | None:
    """Return a line that allows exactly the splits that every group allows; None if there is none."""
    widest = sorted(groups, key=lambda group: (-len(group.splits), -sum(map(len, group.ranks)), group.ranks[::-1]))
    tried: dict[str, None] = {}
    for group in widest[:4]:
        tried.update(dict.fromkeys(candidates(group)))
    for text in tried:
        covered = ranks_were_tried(text, [group.calls[0] for group in groups])
        if covered and all(says(text, call, group.splits) for group in groups for call in group.calls):
            return text
    return None
