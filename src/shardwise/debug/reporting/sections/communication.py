"""Tables of what is communicated: by line, module, axis, kind and cause, and one with every collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ....comm.plan import bytes_text, seconds_text
from ...drawing.markup import Markup, join, tag
from ...explaining.records import CAUSES, Communication, Total
from ..folded import Folded
from ..tables import Cell, Column, bar, filter_box, sortable
from .kinds import kind_markup

_TOTALS = (Column("collectives", number=True), Column("bytes", number=True), Column("modelled time", number=True))
_EVERY = (
    Column("module"),
    Column("line"),
    Column("pass"),
    Column("collective"),
    Column("over"),
    Column("why"),
    *_TOTALS,
)
Keys = Callable[[Communication], Iterable[str]]
_GROUPS: dict[str, tuple[str, Keys]] = {
    "Line": ("line", lambda each: [str(each.line or "no line of the program")]),
    "Module": ("module, with its submodules", lambda each: dict.fromkeys(each.modules)),
    "Axis": ("axis", lambda each: [each.group]),
    "Kind": ("collective", lambda each: [each.kind]),
    "Cause": ("cause", lambda each: [CAUSES.get(each.cause, each.cause)]),
}


def communication(communications: Sequence[Communication], folded: Sequence[Folded]) -> Markup:
    """Return the tables of all communication."""
    if not communications:
        return tag("p", "Nothing was communicated.", class_="fine")
    choice = [_option(name, checked=number == 0) for number, name in enumerate(_GROUPS)]
    chooser = tag("fieldset", tag("legend", "Totals by"), *choice, class_="choice")
    controls = tag("div", chooser, filter_box("Filter", "communication"), class_="controls")
    tables = [tag("div", _totals(name, *_GROUPS[name], communications), data_group=name.lower()) for name in _GROUPS]
    total = Total.of(communications)
    every = sortable("collective-table", "Every collective", _EVERY, [_row(each, total) for each in folded])
    return join([controls, *tables, tag("h3", "Every collective"), every])


def _option(name: str, *, checked: bool) -> Markup:
    return tag("label", tag("input", type="radio", name="group", value=name.lower(), checked=checked), name)


def _totals(name: str, title: str, keys: Keys, communications: Sequence[Communication]) -> Markup:
    groups: dict[str, list[Communication]] = {}
    for each in communications:
        for key in keys(each):
            groups.setdefault(key, []).append(each)
    totals = sorted(((key, Total.of(group)) for key, group in groups.items()), key=lambda item: -item[1].seconds)
    all_of_them = Total.of(communications)
    first = {key: group[0] for key, group in groups.items()}
    rows = [[_name(name, key, first[key]), *_numbers(total, all_of_them)] for key, total in totals]
    return sortable(f"by-{name.lower()}-table", f"Communication by {title}", (Column(title), *_TOTALS), rows)


def _name(group: str, key: str, first: Communication) -> Cell:
    if group == "Line" and first.line is not None:
        return Cell(join([tag("b", key), " ", tag("code", first.line.text)]), key)
    if group == "Kind":
        return Cell(kind_markup(key), key)
    return Cell(tag("code", key) if group == "Module" else key, key)


def _numbers(total: Total, all_of_them: Total) -> list[Cell]:
    share = total.seconds / all_of_them.seconds if all_of_them.seconds else 0.0
    received = total.bytes / all_of_them.bytes if all_of_them.bytes else 0.0
    return [
        Cell(str(total.count), total.count),
        Cell(bar(received, bytes_text(total.bytes)), total.bytes),
        Cell(bar(share, seconds_text(total.seconds)), total.seconds),
    ]


def _row(each: Folded, total: Total) -> list[Cell]:
    first = each.first
    return [
        Cell(tag("code", each.module), each.module),
        Cell(str(first.line or "")),
        Cell(first.phase),
        Cell(kind_markup(first.kind), first.kind),
        Cell(first.group),
        Cell(tag("a", first.cause, href=f"#why-{first.number}"), first.cause),
        *_numbers(each.total, total),
    ]
