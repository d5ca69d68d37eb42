"""Which dims of an op's operands can be split together, found by trying: split them, run the op, combine the results.

>>> factors_of(ProbeCall(call))          # of aten::mm
[SplitDims(dims=((0, 0),), ways=(('concat', 0),), sizes=()),
 SplitDims(dims=((0, 1), (1, 0)), ways=(('sum', 0),), sizes=()),
 SplitDims(dims=((1, 1),), ways=(('concat', 1),), sizes=())]

Agreement on one input says little. These precautions keep false rules out:

- dims are first resized, to a size that no other dim has, by repeating rows in random order: a dim of size 2 split
  into 1 and 1 would broadcast, and with equal sizes one dim is taken for another;
- splits are uneven, in two and in three pieces, of one row and of several: averages fail;
- data is shuffled, taken from {-1, 0, 1}, and drawn with heavy tails: saturated maxima and lucky minima fail;
- a result is the same for all pieces only if it does not depend on the data that is split;
- all factors of a call are tried again with a second shape, in which all of them have new sizes;
- results without elements prove nothing, and a result that fits several ways (zeros) is not used.

Some ops crash on slices of their inputs: run this in a child process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .._torch.ops import schema_of
from .combine import Way, same_results, ways_of_results
from .probe_call import KINDS_OF_DATA, Dims, ProbeCall, Size, generator_of, variants, with_other_data

MOST_SETS = 400  # sets of dims that are tried for one call
SIZES = (7, 6, 8, 9, 10, 11, 5, 12, 13, 14)
"""Sizes that a dim is resized to before it is split; the first that no other dim has."""


class SplitDims(NamedTuple):
    """Dims that can be split together, the way of each result, and the arguments that contain their size."""

    dims: Dims
    ways: tuple[Way, ...]
    sizes: tuple[Size, ...] = ()


def factors_of(setup: ProbeCall, seed: int = 0, gentle: bool = False) -> list[SplitDims] | None:
    """Return the dims of one call that can be split, each at most once; None if the call has no results to compare.

    With `gentle`, only the sample's own data is used, for ops that crash on other data.
    """
    results = setup.run()
    if not results or not any(t.numel() for tensors in results for t in tensors):
        return None
    found: list[SplitDims] = []
    unread: list[tuple[int, int]] = []
    for dims in itertools.islice(_sets(setup), MOST_SETS):
        if any(not set(dims).isdisjoint(split.dims) for split in found) or not set(dims).isdisjoint(unread):
            continue
        for sizes in _size_arguments(setup, dims):
            ways = _ways(setup, dims, sizes, seed, gentle)
            if ways and all(way == ("same", 0) for way in ways):
                unread += dims  # no result depends on these dims: splitting them alone is of no use
                break
            if ways:
                found.append(SplitDims(dims, ways, sizes))
                break
    found = [_with_unread(setup, split, unread, seed, gentle) for split in found]
    return _on_second_shape(setup, found, seed, gentle)


def _with_unread(
    setup: ProbeCall, split: SplitDims, unread: Sequence[tuple[int, int]], seed: int, gentle: bool
) -> SplitDims:
    """Add dims of operands that this call does not read, though another call may."""
    size, first = setup.size(*split.dims[0]), split.dims[0][1]
    for operand, dim in sorted(unread, key=lambda place: (place[0], abs(place[1] - first))):
        if operand not in dict(split.dims) and setup.size(operand, dim) == size:
            dims = tuple(sorted((*split.dims, (operand, dim))))
            if _ways(setup, dims, split.sizes, seed, gentle) == split.ways:
                split = split._replace(dims=dims)
    return split


def _sets(setup: ProbeCall) -> Iterator[Dims]:
    """Yield sets of dims of one size, at most one of each operand, small sets first."""
    dims = setup.dims()
    sets = []
    for size in sorted({n for _, _, n in dims}):
        choices: dict[int, list[tuple[int, int] | None]] = {}
        for operand, dim, n in dims:
            if n == size:
                choices.setdefault(operand, [None]).append((operand, dim))
        some = itertools.islice(itertools.product(*choices.values()), 8 * MOST_SETS)
        sets += [tuple(place for place in chosen if place) for chosen in some if any(chosen)]
    yield from sorted(sets, key=lambda places: (len(places), places))


def _size_arguments(setup: ProbeCall, dims: Dims) -> Iterator[tuple[Size, ...]]:
    """Yield no argument, then one or two that contain this size, of those that may differ between simulated ranks."""
    size = setup.size(*dims[0])
    places: list[Size] = []
    sized = re.findall(r"SymInt\S* (\w+)", str(schema_of(setup.func)))
    for name, value in setup.arguments.items():
        if name not in sized or size == 1:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value == size:
            places.append((name, None))
        elif isinstance(value, (list, tuple)):
            places += [(name, i) for i, element in enumerate(value) if type(element) is int and element == size]
    for count in range(3):
        yield from itertools.combinations(places, count)


def _new_size(setup: ProbeCall, taken: Sequence[int] = ()) -> int:
    used = {n for _, _, n in setup.dims()} | set(taken)
    return next(n for n in (*SIZES, *range(15, 99)) if n not in used)


def _longer(setup: ProbeCall, dims: Dims, sizes: Sequence[Size], seed: int, taken: Sequence[int] = ()) -> ProbeCall:
    generator = generator_of(seed, "rows", dims)
    size = setup.size(*dims[0])
    assert size, "only dims with a size are split"
    rows = torch.randint(size, (_new_size(setup, taken),), generator=generator)
    return setup.select(dims, rows, sizes)


def _ways(setup: ProbeCall, dims: Dims, sizes: Sequence[Size], seed: int, gentle: bool) -> tuple[Way, ...]:
    """Return the way of each result that holds for all data and splits; empty if some result has none."""
    longer = _longer(setup, dims, sizes, seed)
    if longer.run() is None:
        return ()
    ways = _ways_of(longer, dims, sizes, seed, gentle)
    # A dim of size 1 may be just a number in a tensor: it is a dim only if a result grows with it.
    return ways if setup.size(*dims[0]) != 1 or any(way == "concat" for way, _ in ways) else ()


def _ways_of(setup: ProbeCall, dims: Dims, sizes: Sequence[Size], seed: int, gentle: bool) -> tuple[Way, ...]:
    left: list[set[Way]] | None = None
    size = setup.size(*dims[0])
    assert size, "only dims with a size are split"
    for data in [setup] if gentle else variants(setup, seed, dict(dims)):
        expected = data.run()
        if expected is None:
            continue  # the op does not accept this data
        for bounds in ([0, size // 2, size], [0, 1, size], [0, 1, 4, size], [0, size - 2, size]):
            rows = [torch.arange(start, stop) for start, stop in itertools.pairwise(bounds)]
            pieces = [data.select(dims, part, sizes).run() for part in rows]
            ways = ways_of_results(expected, pieces)
            left = ways if left is None else [old & new for old, new in zip(left, ways, strict=True)]
            if not all(left):
                return ()
    chosen = [_chosen(ways, setup, dims, index, seed) for index, ways in enumerate(left or [])]
    return tuple(way for way in chosen if way) if all(chosen) else ()


def _chosen(ways: set[Way], setup: ProbeCall, dims: Dims, result: int, seed: int) -> Way | None:
    """Return the one way that fits, if it is unambiguous."""
    joined = [way for way in ways if way[0] == "concat"]
    if joined:
        return joined[0] if len(joined) == 1 else None
    if ("same", 0) in ways:
        return ("same", 0) if _is_independent(setup, dims, result, seed) and _accepts_no_rows(setup, dims) else None
    return next(iter(ways)) if len(ways) == 1 else None


def _is_independent(setup: ProbeCall, dims: Dims, result: int, seed: int) -> bool:
    """Return whether a result does not depend on the data that is split."""
    expected, split = setup.run(), {operand for operand, _ in dims}
    for number, kind in enumerate(KINDS_OF_DATA * 3):
        other = with_other_data(setup, kind, split, generator_of(seed, kind, number)).run()
        if other is None or expected is None or not same_results(expected[result], other[result]):
            return False
    return True


def _accepts_no_rows(setup: ProbeCall, dims: Dims) -> bool:
    """Return whether the op runs on zero rows: a rank with an empty shard must return the same as all others."""
    return setup.select(dims, torch.arange(0), ()).run() is not None


def _on_second_shape(setup: ProbeCall, found: list[SplitDims], seed: int, gentle: bool) -> list[SplitDims]:
    """Return the splits that also hold when all split dims have other sizes, all different."""
    longer = setup
    taken: list[int] = []
    for split in found:
        longer = _longer(longer, split.dims, split.sizes, seed + 1, taken)
        taken.append(longer.size(*split.dims[0]) or 0)
    if longer.run() is None:
        return found  # the op does not accept longer dims together; each was tried alone
    return [split for split in found if _ways_of(longer, split.dims, split.sizes, seed + 1, gentle) == split.ways]
