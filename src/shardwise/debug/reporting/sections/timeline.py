"""When ranks compute and communicate: data for page.js, which draws it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TypeVar

from ....comm.plan import seconds_text
from ...drawing.markup import Markup, join, tag
from ...explaining.timeline import Span
from .kinds import KINDS, kind_class, kind_markup

T = TypeVar("T")
COMPUTE = "compute"
_MOST_RANKS = 16
_MOST_SPANS = 20000


def timeline(spans: Sequence[Span], *, modelled: bool) -> Markup:
    """Return the place of the drawing, its buttons, and the data."""
    if not spans:
        return tag("p", "Nothing was recorded.", class_="fine")
    ranks = sorted({span.rank for span in spans})
    shown = ranks[: max(1, min(_MOST_RANKS, _MOST_SPANS * len(ranks) // len(spans)))]
    drawn = [span for span in spans if span.rank in set(shown)]
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    buttons = [
        tag("button", text, type="button", data_timeline=action, aria_label=label)
        for text, action, label in (("-", "out", "zoom out"), ("+", "in", "zoom in"), ("all", "all", "show all"))
    ]
    legend = tag("div", *(tag("span", kind_markup(kind)) for kind in KINDS), class_="legend")
    more = f" Drawn: {len(shown)} of {len(ranks)} ranks." if len(ranks) > len(shown) else ""
    how = "modelled" if modelled else "measured on this rank"
    lead = (
        f"{seconds_text(end - begin)}, {how}.{more} Keys: + - zoom, ← → move, 0 shows all, ↑ ↓ go through collectives."
    )
    return join(
        [
            tag("p", lead, class_="lead"),
            tag("div", tag("div", *buttons, class_="tools"), legend, class_="controls"),
            tag("div", "", class_="timeline", id="timeline-drawing"),
            tag("p", "Point at a span to see what it is.", class_="under", id="timeline-text", aria_live="polite"),
            Markup(f'<script type="application/json" id="timeline-data">{_data(drawn, begin, end)}</script>'),
        ]
    )


def _data(spans: Sequence[Span], begin: float, end: float) -> str:
    """Return the spans as JSON: lanes, names and classes once, and for each span their numbers."""
    lanes = _numbered(
        sorted({(span.rank, span.track) for span in spans}, key=lambda lane: (lane[0], lane[1] != COMPUTE, lane[1]))
    )
    names = _numbered(dict.fromkeys(span.name for span in spans))
    details = _numbered(dict.fromkeys(map(_detail, spans)))
    rows = [
        [
            lanes[span.rank, span.track],
            round((span.start - begin) * 1e6, 3),
            round((span.end - span.start) * 1e6, 3),
            names[span.name],
            details[_detail(span)],
        ]
        for span in spans
    ]
    computed = {span.name for span in spans if span.track == COMPUTE}
    kinds = [kind_class(COMPUTE if name in computed else name) for name in names]
    lane_rows = [{"rank": rank, "name": name} for rank, name in lanes]
    data = {
        "end": (end - begin) * 1e6,
        "lanes": lane_rows,
        "names": list(names),
        "kinds": kinds,
        "details": list(details),
        "spans": rows,
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _detail(span: Span) -> str:
    """Return the label of a span: the op it is part of, or the line and module of a collective."""
    about = span.about
    if span.track == COMPUTE:
        return str(about.get("part of") or "")
    return f"{about.get('line')} in {about.get('module')}, {about.get('pass')}" if about.get("line") else ""


def _numbered(keys: Iterable[T]) -> dict[T, int]:
    return {key: number for number, key in enumerate(keys)}
