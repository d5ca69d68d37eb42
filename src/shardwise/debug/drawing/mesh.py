"""A mesh drawn: its ranks, in a table over its last two axes for each coordinate on the others."""

from __future__ import annotations

import itertools

from ...sharding.mesh import DeviceMesh, MeshInfo, mesh_info_of
from .colours import MONO, MUTED, axis_colour
from .markup import Markup, tag

_MOST = 8
_HEAD = "padding:2px 6px;font-weight:400;font-size:.85em;opacity:.68;text-align:center"
_CELL = "padding:4px 9px;text-align:center;min-width:1.8em;border-radius:4px"


def mesh_html(mesh: DeviceMesh | MeshInfo) -> Markup:
    """Return a drawing of a mesh, with its own style, for light and dark pages."""
    info = mesh if isinstance(mesh, MeshInfo) else mesh_info_of(mesh)
    ranks = f"{info.mesh.size()} ranks · {info.device_type}"
    head = tag("div", tag("b", repr(info), style=MONO), " ", tag("span", ranks, style=MUTED), style="margin-bottom:4px")
    outer = info.sizes[:-2]
    places = list(itertools.product(*(range(size) for size in outer)))
    blocks = [_block(info, place) for place in places[:_MOST]]
    if len(places) > _MOST:
        blocks.append(tag("div", f"… {len(places) - _MOST} more", style=MUTED))
    row = tag("div", *blocks, style="display:flex;flex-wrap:wrap;gap:14px;align-items:flex-end")
    return tag("div", head, row, class_="shardwise-mesh", style="display:inline-block;font-size:13px;line-height:1.45")


def _block(info: MeshInfo, place: tuple[int, ...]) -> Markup:
    """Return the table of the ranks at one coordinate on all axes but the last two."""
    ranks = info.mesh.mesh[place] if place else info.mesh.mesh
    rows = ranks.reshape(-1, ranks.shape[-1]).tolist()
    columns = _shown(len(rows[0]))
    last = len(info.sizes) - 1
    head = [tag("td", "")] if last else []
    head += [tag("th", _at(info, last, j), scope="col", style=_HEAD) for j in columns]
    lines = [tag("tr", *head)]
    for i in _shown(len(rows)):
        label = [tag("th", _at(info, last - 1, i), scope="row", style=_HEAD)] if last else []
        lines.append(tag("tr", *label, *(_cell(rows, i, j) for j in columns)))
    title = ", ".join(f"{name} {index}" for name, index in zip(info.names, place, strict=False))
    caption = [tag("caption", title, style=_HEAD)] if title else []
    style = "border-collapse:separate;border-spacing:3px;margin:0;width:auto;background:none"
    return tag("table", *caption, tag("tbody", *lines), style=style)


def _shown(count: int) -> list[int | None]:
    """Return indices, with None for those that are left out."""
    return list(range(count)) if count <= _MOST else [*range(_MOST - 2), None, count - 1]


def _at(info: MeshInfo, axis: int, index: int | None) -> str:
    return "…" if index is None else f"{info.names[axis]} {index}"


def _cell(rows: list[list[int]], i: int | None, j: int | None) -> Markup:
    if i is None or j is None:
        return tag("td", "…", style=_CELL)
    rank, line = rows[i][j], f"border:1.5px solid {axis_colour(i if len(rows) > 1 else j)}"
    return tag("td", rank, style=f"{_CELL};{line};background:hsla(220,10%,50%,.08)", title=f"rank {rank}")
