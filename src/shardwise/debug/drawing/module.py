"""A module drawn: how its parameters and buffers are sharded, and what a rank holds of them."""

from __future__ import annotations

from torch import nn

from ...comm.plan import bytes_text
from ...tensor.dtensor import DTensor
from ..holding_table import HoldingRow, module_rows
from .colours import MONO, MUTED, axis_colour
from .markup import Markup, join, tag
from .spec import axis_texts

_CELL = "padding:2px 14px 2px 0;text-align:left;vertical-align:top"
_NUMBER = "padding:2px 14px 2px 0;text-align:right;font-variant-numeric:tabular-nums"
_MOST = 200


def module_html(module: nn.Module) -> Markup:
    """Return a table of a module's parameters, with its own style, for light and dark pages."""
    rows = module_rows(module)
    largest = max([row.held for row in rows], default=0)
    heads = ("parameter", "sharding", "axes", "global", "per rank", "")
    lines = [tag("tr", *(tag("th", text, scope="col", style=f"{_CELL};{MUTED};font-weight:400") for text in heads))]
    lines += [_row(row, largest) for row in rows[:_MOST]]
    if len(rows) > _MOST:
        lines.append(tag("tr", tag("td", f"⋮ {len(rows) - _MOST} more", colspan=6, style=MUTED)))
    total, held = sum(row.total for row in rows), sum(row.held for row in rows)
    numbers = [tag("td", tag("b", bytes_text(count)), style=_NUMBER) for count in (total, held)]
    lines.append(tag("tr", tag("td", tag("b", "total"), colspan=3, style=_CELL), *numbers, tag("td", "")))
    meshes = {repr(row.tensor.spec.mesh_info) for row in rows if isinstance(row.tensor, DTensor)}
    where = f" on {', '.join(sorted(meshes))}" if meshes else " is not distributed"
    head = tag("div", tag("b", type(module).__name__, style=MONO), tag("span", where, style=MUTED))
    table = tag("table", tag("tbody", *lines), style="border-collapse:collapse;margin:4px 0;width:auto;background:none")
    return tag("div", head, table, class_="shardwise-module", style="font-size:13px;line-height:1.45")


def _row(row: HoldingRow, largest: int) -> Markup:
    width = max(1, round(90 * row.held / largest)) if largest else 0
    bar = tag(
        "div", "", style=f"width:{width}px;height:9px;margin-top:5px;border-radius:2px;background:{axis_colour(0)}"
    )
    cells = [tag("td", row.name, style=f"{_CELL};{MONO}"), tag("td", row.sharding(), style=f"{_CELL};{MONO}")]
    cells.append(tag("td", _axes(row), style=_CELL))
    cells += [tag("td", bytes_text(count), style=_NUMBER) for count in (row.total, row.held)]
    return tag("tr", *cells, tag("td", bar))


def _axes(row: HoldingRow) -> Markup:
    """Return what each axis does, except for those that replicate."""
    if not isinstance(row.tensor, DTensor):
        return Markup("")
    chips = [
        tag(
            "span",
            f"{name.partition('=')[0]} {text}",
            style=f"border-left:4px solid {axis_colour(axis)};padding:0 8px 0 5px",
        )
        for axis, (name, text) in enumerate(axis_texts(row.tensor.spec))
        if text != "replicates"
    ]
    return join(chips) if chips else tag("span", "replicated", style=MUTED)
