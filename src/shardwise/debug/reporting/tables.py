"""Tables that sort by the buttons in their heads, and filter; without scripts they are plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..drawing.markup import Markup, tag


class Column(NamedTuple):
    """A column: its name, and whether it holds numbers."""

    name: str
    number: bool = False


class Cell(NamedTuple):
    """A cell: the text, and the value to sort by if it is not the text."""

    shown: str
    value: float | str | None = None


def sortable(name: str, caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Markup:
    """Return a table whose first column names the rows."""
    heads = [
        tag("th", tag("button", column.name, type="button"), scope="col", aria_sort="none", class_=_kind(column))
        for column in columns
    ]
    lines = [
        tag(
            "tr",
            *(_cell(cell, column, first=i == 0) for i, (cell, column) in enumerate(zip(row, columns, strict=True))),
        )
        for row in rows
    ]
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *lines),
        class_="data",
        id=name,
    )
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _cell(cell: Cell, column: Column, *, first: bool) -> Markup:
    attributes = {"data_value": None if cell.value is None else cell.value, "class_": _kind(column)}
    return tag("th", cell.shown, scope="row", **attributes) if first else tag("td", cell.shown, **attributes)  # type: ignore[arg-type]


def _kind(column: Column) -> str | None:
    return "number" if column.number else None


def filter_box(label: str, section: str) -> Markup:
    """Return a box that filters the rows of all tables, and all items, of a section."""
    box = tag(
        "input", type="search", id=f"{section}-filter", data_filters=section, placeholder="text, or several words"
    )
    count = tag("output", "", for_=f"{section}-filter", aria_live="polite", class_="count")
    return tag("div", tag("label", label, for_=f"{section}-filter"), box, count, class_="filter")


def bar(share: float, text: str) -> Markup:
    """Return text with a bar behind it whose length is a share of the cell."""
    fill = tag("span", "", class_="fill", style=f"width:{100 * max(0.0, min(share, 1.0)):.1f}%")
    return tag("span", fill, tag("span", text), class_="bar")
