"""A redistribution drawn: its steps, with the tensor before and after."""

from __future__ import annotations

from ...comm.plan import SpecPlan, bytes_text, received_exactly, seconds_text
from ...sharding.mesh import names_text
from ...sharding.spec_text import spec_text
from .colours import MONO, MUTED
from .markup import Markup, tag
from .spec import spec_html

_CELL = "padding:2px 10px 2px 0;text-align:left"
_NUMBER = "padding:2px 10px 2px 0;text-align:right;font-variant-numeric:tabular-nums"


def plan_html(plan: SpecPlan) -> Markup:
    """Return a drawing of a plan, with its own style, for light and dark pages."""
    names, dtype = plan.source.mesh_info.names, plan.source.dtype
    heads = ("", "step", "over", "received", "modelled", "then")
    rows = [tag("tr", *(tag("th", text, scope="col", style=f"{_CELL};{MUTED};font-weight:400") for text in heads))]
    for number, step in enumerate(plan.plan.steps, 1):
        over = names_text([names[axis] for axis in step.axes]) if step.axes else "locally"
        received = bytes_text(received_exactly(step, dtype.itemsize))
        cells = [
            tag("td", f"{number}.", style=_NUMBER),
            tag("td", step.label(), style=_CELL),
            tag("td", over, style=_CELL),
        ]
        cells += [tag("td", text, style=_NUMBER) for text in (received, seconds_text(step.seconds))]
        cells.append(tag("td", spec_text(step.after, dtype, names), style=f"{_CELL};{MONO}"))
        rows.append(tag("tr", *cells))
    steps = tag("table", tag("tbody", *rows), style="border-collapse:collapse;margin:6px 0;width:auto;background:none")
    pictures = [spec_html(plan.source), tag("span", "→", style="font-size:20px"), spec_html(plan.target)]
    row = tag("div", *pictures, style="display:flex;flex-wrap:wrap;gap:18px;align-items:center")
    total = f"{seconds_text(plan.plan.seconds)} by the cost model"
    return tag("div", row, steps, tag("div", total, style=MUTED), class_="shardwise-plan", style="font-size:13px")
