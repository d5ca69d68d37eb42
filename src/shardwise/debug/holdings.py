"""Which ranks hold which shard of a tensor: arithmetic on a spec, the same on every rank.

A mesh that is a slice of another has several instances, each with a tensor of its own. These functions describe one of
them: its ranks, in mesh order, with their coordinates.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from ..sharding.layout import Coordinate, Run
from ..sharding.spec import DTensorSpec

T = TypeVar("T")
Ranks = tuple[int, ...]
Runs = tuple[tuple[Run, ...], ...]
_SHOWN_RUNS = 6


def members(spec: DTensorSpec) -> dict[int, Coordinate]:
    """Return the coordinates of the ranks of this process's instance of the mesh."""
    instances = spec.mesh_info.instances.flatten(1).tolist()
    own = dist.get_rank() if dist.is_initialized() else 0  # a spec may outlive its world
    ranks = next((ranks for ranks in instances if own in ranks), instances[0])
    coordinates = itertools.product(*map(range, spec.mesh_info.sizes))
    return dict(zip(ranks, coordinates, strict=True))


def holdings(spec: DTensorSpec) -> dict[Runs, Ranks]:
    """Return the ranks that hold each shard. A shard is its runs on every dim; an empty one has no runs."""
    found: dict[Runs, Ranks] = {}
    for rank, at in members(spec).items():
        runs = spec.layout.runs(at)
        shard = runs if all(runs) else ()
        found[shard] = (*found.get(shard, ()), rank)
    return found


@dataclass(frozen=True)
class Grid:
    """A tensor of one or two dims, divided wherever a run of some rank begins or ends.

    `cells[i][j]` are the ranks that hold rows `rows[i]` of columns `columns[j]`; a 1-D tensor is one row. Some rows and
    columns may be left out.
    """

    rows: tuple[Run, ...]
    columns: tuple[Run, ...]
    cells: tuple[tuple[Ranks, ...], ...]


def grid(spec: DTensorSpec, most: int | None = None) -> Grid:
    """Return the grid of a tensor of one or two dims; of more than `most` rows or columns some."""
    shards = {runs: ranks for runs, ranks in holdings(spec).items() if runs}
    if spec.ndim == 1:
        shards = {(((0, 1),), *runs): ranks for runs, ranks in shards.items()}
    rows, columns = (shown(_segments([runs[dim] for runs in shards]), most) for dim in (0, 1))
    cells = tuple(tuple(_holders(shards, row, column) for column in columns) for row in rows)
    return Grid(rows, columns, cells)


def shown(items: Sequence[T], most: int | None) -> tuple[T, ...]:
    """Return all items, or the first ones and the last if there are more than `most`."""
    return tuple(items) if most is None or len(items) <= most else (*items[: most - 1], items[-1])


def _segments(runs_of_shards: Sequence[Sequence[Run]]) -> tuple[Run, ...]:
    """Return the segments between the indices at which a run begins or ends."""
    ends = sorted({end for runs in runs_of_shards for run in runs for end in run})
    return tuple(itertools.pairwise(ends))


def _holders(shards: Mapping[Runs, Ranks], row: Run, column: Run) -> Ranks:
    holders = [ranks for (rows, columns), ranks in shards.items() if _within(row, rows) and _within(column, columns)]
    return tuple(sorted(rank for ranks in holders for rank in ranks))


def _within(segment: Run, runs: Sequence[Run]) -> bool:
    return any(start <= segment[0] and segment[1] <= stop for start, stop in runs)


# ---- text ------------------------------------------------------------------------------------------------------------


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, consecutive ones as a range: `0-3,8`."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1].append(rank)
        else:
            pieces.append([rank])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}{'-' if len(p) > 2 else ','}{p[-1]}" for p in pieces)


def holders_text(spec: DTensorSpec, ranks: Sequence[int]) -> str:
    """Return the ranks that hold a shard as text; for a Partial tensor with its reduction, as in `0 + 1`."""
    return _reduction_text(ranks, members(spec), spec.layout.partial)


def _reduction_text(
    ranks: Sequence[int], coordinates: Mapping[int, Coordinate], partial: Sequence[tuple[int, str]]
) -> str:
    if not partial:
        return ranks_text(ranks)
    (axis, op), *inner = partial
    terms: dict[int, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: (coordinates[rank][axis], rank)):
        terms.setdefault(coordinates[rank][axis], []).append(rank)
    texts = [_reduction_text(term, coordinates, inner) for term in terms.values()]
    return " + ".join(texts) if op == "sum" else f"{op}({' | '.join(texts)})"


def shard_text(spec: DTensorSpec, runs: Runs) -> str:
    """Return a shard as an index: `[0:2, :, 1:3+5:7]`. Of many runs only some are shown."""
    if not runs and spec.ndim:
        return "empty"
    texts = [
        ":" if held == ((0, size),) else "+".join(_some([run_text(run) for run in held]))
        for held, size in zip(runs, spec.shape, strict=True)
    ]
    return f"[{', '.join(texts)}]"


def _some(texts: list[str]) -> list[str]:
    return texts if len(texts) <= _SHOWN_RUNS else [*texts[: _SHOWN_RUNS - 1], "...", texts[-1]]


def run_text(run: Run) -> str:
    """Return a run as a slice: `2:4`."""
    return f"{run[0]}:{run[1]}"
