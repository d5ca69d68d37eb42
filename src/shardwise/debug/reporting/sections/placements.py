"""The meshes, and a drawing of each way in which parameters are sharded."""

from __future__ import annotations

from collections.abc import Sequence

from ....sharding.mesh import MeshInfo
from ....sharding.spec import DTensorSpec
from ...drawing.markup import Markup, join, tag
from ...drawing.mesh import mesh_html
from ...drawing.spec import axis_texts, spec_html
from ..folded import starred
from ..holders import Held

_MOST = 12
_NAMES = 4


def placements(tensors: Sequence[Held], used: Sequence[MeshInfo]) -> Markup:
    """Return drawings of the meshes, and of one parameter for each combination of placements.

    `used` are the meshes of a step: they are drawn where no parameter has one.
    """
    meshes: dict[int, MeshInfo] = {}
    alike: dict[tuple[object, ...], list[Held]] = {}
    for each in tensors:
        if each.spec is not None:
            meshes.setdefault(id(each.spec.mesh_info), each.spec.mesh_info)
            alike.setdefault(_kind(each.spec), []).append(each)
    if not alike:
        drawn_meshes = [tag("figure", mesh_html(mesh)) for mesh in used]
        none = tag("p", "No parameter is distributed.", class_="fine")
        return join([tag("div", *drawn_meshes, class_="drawings"), none]) if used else none
    figures = [tag("figure", mesh_html(mesh)) for mesh in meshes.values()]
    groups = sorted(alike.values(), key=lambda group: -sum(each.total for each in group))
    drawn = [_figure(group) for group in groups[:_MOST]]
    parts = [
        tag("div", *figures, class_="drawings"),
        tag("h3", "How parameters are sharded"),
        tag("div", *drawn, class_="drawings"),
    ]
    if len(groups) > _MOST:
        parts.append(
            tag("p", f"{len(groups) - _MOST} more ways of sharding are in the table of parameters.", class_="fine")
        )
    return join(parts)


def _kind(spec: DTensorSpec) -> tuple[object, ...]:
    return (id(spec.mesh_info), spec.ndim, spec.layout.is_even(), *axis_texts(spec))


def _figure(group: Sequence[Held]) -> Markup:
    first = max(group, key=lambda each: each.total)
    assert first.spec is not None
    names = list(dict.fromkeys(starred(each.name) for each in (first, *group)))
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    caption = tag("figcaption", tag("code", ", ".join(names[:_NAMES])), more)
    return tag("figure", spec_html(first.spec), caption)
