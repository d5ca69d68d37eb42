"""Pictures of which ranks hold which shards: a grid for tensors of one or two dims, a list for others.

>>> print(draw(distribute_tensor(torch.zeros(4, 6), mesh, P("dp", "tp"))))
f32[4@dp, 6@tp] on mesh(dp=2, tp=2)
      0:3   3:6
    ┌─────┬─────┐
0:2 │  0  │  1  │
2:4 │  2  │  3  │
    └─────┴─────┘
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import nn

from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor
from .holding_table import draw_module
from .holdings import Grid, grid, holders_text, holdings, members, ranks_text, run_text, shard_text

_MAX_WIDTH = 120
_MAX_CELLS = 2000
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")


def draw(dtensor: DTensor | DTensorSpec | nn.Module) -> str:
    """Return a picture of which ranks hold which shards of a tensor, or a table of a module's parameters.

    Each cell of the grid is a block of the tensor with the ranks that hold it. Tensors of other than one or two dims,
    and grids too large for a terminal, are listed instead. Nothing is communicated. For a mesh sliced from another, the
    instance of this process's rank is drawn.

    The table of a module shows how each parameter and buffer is sharded, its bytes, and the bytes of its largest shard.

    >>> print(draw(x))
    f32[8@dp, 4@tp] on mesh(dp=2, tp=2)
          0:2   2:4
        ┌─────┬─────┐
    0:4 │  0  │  1  │
    4:8 │  2  │  3  │
        └─────┴─────┘
    """
    if isinstance(dtensor, nn.Module):
        return draw_module(dtensor)
    spec = _spec_of(dtensor)
    lines = [f"{spec!r} on {spec.mesh_info!r}"]
    lines += _grid_lines(spec) or _list_lines(spec)
    return "\n".join(lines)


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which shards, on the first rank of the mesh: in colour with `use_rich`, if installed.

    >>> visualize_sharding(x)
    """
    spec = _spec_of(dtensor)
    if spec.mesh_info.outside or any(spec.mesh_info.coordinate):
        return
    if header:
        print(header)
    if use_rich and importlib.util.find_spec("rich") and (picture := _small_grid(spec)):
        _print_rich(spec, picture)
    else:
        print(draw(spec))


def _spec_of(value: DTensor | DTensorSpec) -> DTensorSpec:
    return value if isinstance(value, DTensorSpec) else value._spec


def _small_grid(spec: DTensorSpec) -> Grid | None:
    """Return the grid; None for tensors of other than one or two dims, empty ones, and grids of too many cells."""
    if spec.ndim not in (1, 2) or spec.shape.numel() == 0:
        return None
    picture = grid(spec)
    return picture if len(picture.rows) * len(picture.columns) <= _MAX_CELLS else None


def _empty_shards_line(spec: DTensorSpec) -> str:
    """Return a line that names the ranks whose shards are empty; "" if there are none."""
    empty = () if spec.ndim == 0 else holdings(spec).get((), ())
    return f"empty shards: {ranks_text(empty)}" if empty else ""


def _grid_lines(spec: DTensorSpec) -> list[str]:
    """Return the grid as lines; no lines if it is too wide."""
    picture = _small_grid(spec)
    if picture is None:
        return []
    cells = [[holders_text(spec, ranks) for ranks in row] for row in picture.cells]
    top = [run_text(run) for run in picture.columns]
    widths = [max(len(text) for text in column) + 2 for column in zip(top, *cells, strict=True)]
    names = [run_text(run) if spec.ndim == 2 else "" for run in picture.rows]
    margin = max(map(len, names))
    if margin + sum(widths) + len(widths) + 2 > _MAX_WIDTH:
        return []
    rule = ["─" * width for width in widths]
    lines = [f"{'':{margin}}  {' '.join(t.center(w) for t, w in zip(top, widths, strict=True))}"]
    lines.append(f"{'':{margin}} ┌{'┬'.join(rule)}┐")
    for name, row in zip(names, cells, strict=True):
        lines.append(f"{name:>{margin}} │{'│'.join(t.center(w) for t, w in zip(row, widths, strict=True))}│")
    lines.append(f"{'':{margin}} └{'┴'.join(rule)}┘")
    lines = [line.rstrip() for line in lines]
    return [*lines, line] if (line := _empty_shards_line(spec)) else lines


def _list_lines(spec: DTensorSpec) -> list[str]:
    """Return one line for each shard: its ranks and its index."""
    rows = [(holders_text(spec, ranks), shard_text(spec, shard)) for shard, ranks in holdings(spec).items()]
    width = max(len(ranks) for ranks, _ in rows)
    return [f"  {ranks:>{width}}  {shard}" for ranks, shard in rows]


def _print_rich(spec: DTensorSpec, picture: Grid) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {rank: _COLOURS[i % len(_COLOURS)] for i, rank in enumerate(members(spec))}

    def cell(ranks: Sequence[int]) -> Text:
        return Text(holders_text(spec, ranks), style=colours[ranks[0]])

    table = Table(show_lines=True)
    if spec.ndim == 2:
        table.add_column("")
    for run in picture.columns:
        table.add_column(run_text(run), justify="center")
    for run, row in zip(picture.rows, picture.cells, strict=True):
        name = [Text(run_text(run))] if spec.ndim == 2 else []
        table.add_row(*name, *(cell(ranks) for ranks in row))
    console = Console()
    console.print(f"{spec!r} on {spec.mesh_info!r}", markup=False, highlight=False)
    console.print(table)
    if line := _empty_shards_line(spec):
        console.print(line, highlight=False)
