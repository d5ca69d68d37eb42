"""Who holds what of a tensor, as data: pure arithmetic on a spec, the same on every rank.

A mesh that is a slice of another has several instances, each with a tensor of its own. These functions speak of one of
them: its ranks, in mesh order, with their coordinates.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..sharding.layout import Coordinate, Run
from ..sharding.spec import DTensorSpec

Ranks = tuple[int, ...]
Runs = tuple[tuple[Run, ...], ...]
_SHOWN_RUNS = 6


def members(spec: DTensorSpec) -> dict[int, Coordinate]:
    """The ranks of this process's instance of the mesh and their coordinates."""
    instances = spec.mesh_info.instances.flatten(1).tolist()
    ranks = next((ranks for ranks in instances if dist.get_rank() in ranks), instances[0])
    places = itertools.product(*map(range, spec.mesh_info.sizes))
    return dict(zip(ranks, places, strict=True))


def holdings(spec: DTensorSpec) -> dict[Runs, Ranks]:
    """The ranks that hold each part, given as its runs on every dim. For ranks that hold nothing, there are no runs."""
    found: dict[Runs, Ranks] = {}
    for rank, at in members(spec).items():
        runs = spec.layout.runs(at)
        part = runs if all(runs) else ()
        found[part] = (*found.get(part, ()), rank)
    return found


@dataclass(frozen=True)
class Grid:
    """A tensor of one or two dims, parted wherever some rank's part begins or ends.

    `cells[i][j]` are the ranks that hold rows `rows[i]` of columns `columns[j]`; a 1-D tensor is one row.
    """

    rows: tuple[Run, ...]
    columns: tuple[Run, ...]
    cells: tuple[tuple[Ranks, ...], ...]


def grid(spec: DTensorSpec) -> Grid:
    """The grid of a tensor of one or two dims."""
    parts = {runs: ranks for runs, ranks in holdings(spec).items() if runs}
    if spec.ndim == 1:
        parts = {(((0, 1),), *runs): ranks for runs, ranks in parts.items()}
    rows, columns = (_segments([runs[dim] for runs in parts]) for dim in (0, 1))
    cells = tuple(tuple(_holders(parts, row, column) for column in columns) for row in rows)
    return Grid(rows, columns, cells)


def _segments(runs_of_parts: Sequence[Sequence[Run]]) -> tuple[Run, ...]:
    """The pieces between all the places where a run begins or ends."""
    ends = sorted({end for runs in runs_of_parts for run in runs for end in run})
    return tuple(itertools.pairwise(ends))


def _holders(parts: Mapping[Runs, Ranks], row: Run, column: Run) -> Ranks:
    holders = [ranks for (rows, columns), ranks in parts.items() if _within(row, rows) and _within(column, columns)]
    return tuple(sorted(rank for ranks in holders for rank in ranks))


def _within(segment: Run, runs: Sequence[Run]) -> bool:
    return any(start <= segment[0] and segment[1] <= stop for start, stop in runs)


# ---- as text ---------------------------------------------------------------------------------------------------------


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks, with those in a row as a range: `0-3,8`."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1].append(rank)
        else:
            pieces.append([rank])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}{'-' if len(p) > 2 else ','}{p[-1]}" for p in pieces)


def holders_text(spec: DTensorSpec, ranks: Sequence[int]) -> str:
    """The ranks that hold a part. Where they hold operands, with the reduction that makes the value of them."""
    return _reduction_text(ranks, members(spec), spec.layout.partial)


def _reduction_text(ranks: Sequence[int], places: Mapping[int, Coordinate], partial: Sequence[tuple[int, str]]) -> str:
    if not partial:
        return ranks_text(ranks)
    (axis, op), *inner = partial
    operands = itertools.groupby(sorted(ranks, key=lambda rank: (places[rank][axis], rank)), lambda r: places[r][axis])
    texts = [_reduction_text(list(group), places, inner) for _, group in operands]
    return " + ".join(texts) if op == "sum" else f"{op}({' | '.join(texts)})"


def part_text(spec: DTensorSpec, runs: Runs) -> str:
    """A part as an index: `[0:2, :, 1:3+5:7]`. Of many runs only some are shown."""
    if not runs and spec.ndim:
        return "nothing"
    whole = [((0, size),) for size in spec.shape]
    texts = [
        ":" if held == everything else "+".join(_some([run_text(run) for run in held]))
        for held, everything in zip(runs, whole, strict=True)
    ]
    return f"[{', '.join(texts)}]"


def _some(texts: list[str]) -> list[str]:
    return texts if len(texts) <= _SHOWN_RUNS else [*texts[: _SHOWN_RUNS - 1], "...", texts[-1]]


def run_text(run: Run) -> str:
    """A run as a slice: `2:4`."""
    return f"{run[0]}:{run[1]}"
