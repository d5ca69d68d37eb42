"""A table of parameters and buffers, and what each rank holds of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ....comm.plan import bytes_text
from ...drawing.markup import Markup, join, tag
from ..holders import Held, memory_by_rank
from ..tables import Cell, Column, bar, filter_box, sortable

_MOST_COLUMNS = 64
_COLUMNS = (
    Column("name"),
    Column("kind"),
    Column("sharding"),
    Column("axes"),
    Column("global", number=True),
    Column("per rank", number=True),
    Column("copies", number=True),
)


def parameters(tensors: Sequence[Held]) -> Markup:
    """Return the table, and a chart of the memory of ranks."""
    if not tensors:
        return tag("p", "No module was called, so no parameters are known.", class_="fine")
    largest = max(each.held for each in tensors)
    rows = [_row(each, largest) for each in tensors]
    table = sortable("parameter-table", "Parameters and buffers", _COLUMNS, rows)
    controls = tag("div", filter_box("Filter", "parameters"), class_="controls")
    return join([_memory(memory_by_rank(list(tensors))), controls, table])


def _row(each: Held, largest: int) -> list[Cell]:
    axes = ", ".join(f"{axis.partition('=')[0]} {text}" for axis, text in each.axes if text != "replicates")
    copies = sum(each.rank_bytes.values()) / each.total if each.total else 0.0
    return [
        Cell(tag("code", each.name), each.name),
        Cell(each.kind),
        Cell(tag("code", each.sharding), each.sharding),
        Cell(axes or ("replicated" if each.spec is not None else "not distributed")),
        Cell(bytes_text(each.total), each.total),
        Cell(bar(each.held / largest if largest else 0.0, bytes_text(each.held)), each.held),
        Cell(f"{copies:.3g}", copies),
    ]


def _memory(memory: Mapping[int, int]) -> Markup:
    """Return a column for each rank; of many ranks, one for each range of them, as high as its largest."""
    most = max(memory.values())
    ranks = list(memory)
    size = math.ceil(len(ranks) / _MOST_COLUMNS)
    groups = [ranks[i : i + size] for i in range(0, len(ranks), size)]
    columns = []
    for group in groups:
        held = max(memory[rank] for rank in group)
        name = f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}"
        height = 100 * held / most if most else 0
        block = tag("div", "", class_="column", style=f"height:{height:.1f}%")
        columns.append(tag("li", block, tag("span", name), title=f"rank {name}: {bytes_text(held)}"))
    span = (
        f"{bytes_text(min(memory.values()))} to {bytes_text(most)}"
        if min(memory.values()) != most
        else bytes_text(most)
    )
    lead = f"Each rank holds {span} of parameters and buffers. By rank:"
    label = f"Bytes of parameters and buffers by rank: {span}"
    return join(
        [
            tag("p", lead, class_="lead"),
            tag("ul", *columns, class_="memory", aria_label=label),
            tag("h3", "Parameters and buffers"),
        ]
    )
