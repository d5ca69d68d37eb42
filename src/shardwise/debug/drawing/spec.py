"""A spec drawn: what each axis does, and which ranks hold which shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...comm.plan import bytes_text
from ...sharding.layout import Run, dim_axes
from ...sharding.spec import DTensorSpec
from ..holdings import Ranks, grid, holders_text, holdings, ranks_text, run_text, shard_text, shown
from .colours import MONO, MUTED, PLAIN, axis_colour, ground
from .markup import Markup, join, tag

_MOST = 8
"""Rows, columns or shards that are drawn: of more, the first ones and the last."""
_MOST_RANKS = 12
_CELL = "padding:3px 9px;text-align:center;min-width:2.2em;border-radius:3px"
_HEAD = "padding:2px 6px;font-weight:400;font-size:.85em;text-align:center;opacity:.68"


def spec_html(spec: DTensorSpec, *, title: str = "") -> Markup:
    """Return a drawing of a spec, with its own style, for light and dark pages."""
    held = spec.layout.max_local_numel() * spec.dtype.itemsize
    total = spec.shape.numel() * spec.dtype.itemsize
    facts = f"on {spec.mesh_info!r} · {bytes_text(total)}, {bytes_text(held)} per rank"
    head = join([f"{title} " if title else "", tag("b", repr(spec), style=MONO), " ", tag("span", facts, style=MUTED)])
    parts = [tag("div", head, style="margin-bottom:4px"), _axes(spec), _shards(spec)]
    return tag("div", *parts, class_="shardwise-spec", style="display:inline-block;font-size:13px;line-height:1.45")


def axis_texts(spec: DTensorSpec) -> list[tuple[str, str]]:
    """Return what each axis does: `[("dp=2", "shards dim 0"), ("tp=4", "replicates")]`."""
    partial = dict(spec.layout.partial)
    found = []
    for axis, (name, size) in enumerate(zip(spec.mesh_info.names, spec.mesh_info.sizes, strict=True)):
        dims = [dim for dim, factors in enumerate(spec.layout.dims) if axis in dim_axes(factors)]
        if axis in partial:
            text = f"holds terms of a {partial[axis]}"
        else:
            text = f"shards dim {dims[0]}" if dims else "replicates"
        found.append((f"{name}={size}", text))
    return found


def _axes(spec: DTensorSpec) -> Markup:
    def chip(axis: int, name: str, text: str) -> Markup:
        colour = axis_colour(axis) if text != "replicates" else "hsla(220,10%,50%,.6)"
        style = f"display:inline-block;margin:0 10px 4px 0;padding-left:7px;border-left:4px solid {colour}"
        return tag("span", tag("b", name), f" {text}", style=style)

    chips = [chip(axis, name, text) for axis, (name, text) in enumerate(axis_texts(spec))]
    return tag("div", *chips)


def _shards(spec: DTensorSpec) -> Markup:
    if spec.ndim in (1, 2) and spec.shape.numel():
        return _grid(spec)
    return _list(spec)


def _grid(spec: DTensorSpec) -> Markup:
    """Return the tensor as a table of blocks, with gaps where some are left out."""
    picture = grid(spec, _MOST)
    colours = _colours(ranks for row in picture.cells for ranks in row)
    gaps = _gaps(picture.columns)
    heads = [
        _with_gap([tag("th", run_text(run), scope="col", style=_HEAD)], i in gaps)
        for i, run in enumerate(picture.columns)
    ]
    rows = [tag("tr", tag("td", ""), *heads)]
    for i, (run, cells) in enumerate(zip(picture.rows, picture.cells, strict=True)):
        if i in _gaps(picture.rows):
            rows.append(tag("tr", tag("td", "⋮", colspan=len(cells) + len(gaps) + 1, style="text-align:center")))
        name = run_text(run) if spec.ndim == 2 else ""
        drawn = [_with_gap([_cell(spec, ranks, colours[ranks])], j in gaps) for j, ranks in enumerate(cells)]
        rows.append(tag("tr", tag("th", name, scope="row", style=_HEAD), *drawn))
    empty = holdings(spec).get((), ())
    note = tag("div", f"empty shards: {some_ranks(empty)}", style=MUTED) if empty else Markup("")
    return join([_table(rows), note])


def _list(spec: DTensorSpec) -> Markup:
    """Return one line for each shard, with a gap where some are left out."""
    held = list(holdings(spec).items())
    lines = shown(held, _MOST)
    colours = _colours(ranks for _, ranks in held)
    rows = [
        tag(
            "tr", _cell(spec, ranks, colours[ranks]), tag("td", shard_text(spec, runs), style=f"padding:2px 8px;{MONO}")
        )
        for runs, ranks in lines
    ]
    if len(lines) < len(held):
        rows.insert(-1, tag("tr", tag("td", f"⋮ {len(held) - len(lines)} more", colspan=2, style=MUTED)))
    return _table(rows)


def _table(rows: Sequence[Markup]) -> Markup:
    style = "border-collapse:separate;border-spacing:3px;margin:0;width:auto;background:none"
    return tag("table", tag("tbody", *rows), style=style)


def _colours(holders: Iterable[Ranks]) -> dict[Ranks, int]:
    return {ranks: number for number, ranks in enumerate(dict.fromkeys(holders))}


def _cell(spec: DTensorSpec, ranks: Ranks, colour: int) -> Markup:
    everywhere = len(ranks) == math.prod(spec.mesh_info.sizes) and not spec.layout.partial
    many = len(ranks) > _MOST_RANKS
    text = some_ranks(ranks) if many else holders_text(spec, ranks)
    style = f"{_CELL};{PLAIN if everywhere else ground(colour)}"
    return tag("td", text, style=style, title=f"ranks {ranks_text(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}")


def some_ranks(ranks: Ranks) -> str:
    """Return ranks as text, the first and the last of many: `0, 8, …, 504 (64 ranks)`."""
    text = ranks_text(ranks)
    if text.count(",") < _MOST_RANKS:
        return text
    return f"{ranks[0]}, {ranks[1]}, …, {ranks[-1]} ({len(ranks)} ranks)"


def _gaps(runs: Sequence[Run]) -> set[int]:
    """Return the positions before which runs are left out."""
    return {i for i in range(1, len(runs)) if runs[i - 1][1] != runs[i][0]}


def _with_gap(cells: list[Markup], gap: bool) -> Markup:
    return join([tag("td", "…"), *cells] if gap else cells)
