"""Why each collective was needed: line, reason, what it cost, what else was possible, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from ....comm.plan import bytes_text, seconds_text
from ...drawing.markup import Markup, join, tag
from ...explaining.records import CAUSES, Choice
from ..folded import Folded
from ..tables import filter_box
from .kinds import kind_markup

_MOST_REJECTED = 6


def explanations(folded: Sequence[Folded]) -> Markup:
    """Return an entry that opens for each collective, the costliest first."""
    if not folded:
        return tag("p", "There is no communication to explain.", class_="fine")
    ordered = sorted(folded, key=lambda each: -each.total.seconds)
    entries = [_entry(each) for each in ordered]
    controls = tag("div", filter_box("Filter", "explanations"), class_="controls")
    return join([controls, tag("div", *entries, class_="explanations")])


def _entry(each: Folded) -> Markup:
    first = each.first
    times = f"{each.total.count} x " if each.total.count > 1 else ""
    price = f"{bytes_text(each.total.bytes)}, {seconds_text(each.total.seconds)}"
    head = tag(
        "summary",
        tag("b", times, kind_markup(first.kind), f" over {first.group}"),
        tag("span", str(first.line or ""), " ", first.phase),
        tag("code", each.module),
        tag("span", price, class_="price"),
    )
    return tag("details", head, tag("div", *_body(each)), id=f"why-{first.number}", class_="entry")


def _body(each: Folded) -> list[Markup]:
    first = each.first
    parts = []
    if first.line is not None and first.line.text:
        parts.append(tag("pre", tag("code", first.line.text), class_="source", title=first.line.path))
    meaning = CAUSES.get(first.cause, first.cause)
    parts.append(tag("p", tag("b", "Why: "), first.reason or meaning))
    if first.before is not None and first.after is not None:
        move = join([tag("code", first.before), " → ", tag("code", first.after)])
        what = f" ({first.operand} of {first.op})" if first.operand and first.op else ""
        parts.append(tag("p", tag("b", "Moved: "), move, what))
    numbers = ", ".join(map(str, each.numbers[:8])) + (" …" if len(each.numbers) > 8 else "")
    where = f"in the {first.phase} pass of {each.module}; {_count(each)} {numbers} of the step; {meaning}"
    parts.append(tag("p", tag("b", "Where: "), where))
    if first.chosen is not None:
        parts.append(_choices(first.chosen, first.rejected))
    if first.edit:
        parts.append(tag("p", tag("b", "To avoid it: "), tag("code", first.edit), class_="edit"))
    return parts


def _count(each: Folded) -> str:
    return "collective" if len(each.numbers) == 1 else "collectives"


def _choices(chosen: Choice, rejected: Sequence[Choice]) -> Markup:
    heads = ("", "what the axes do", "what is moved", "bytes", "modelled")
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in heads)))
    rows = [_choice("chosen", chosen), *(_choice("rejected", choice) for choice in rejected[:_MOST_REJECTED])]
    return tag("table", tag("caption", "Alternatives", hidden=True), head, tag("tbody", *rows), class_="choices")


def _choice(state: str, choice: Choice) -> Markup:
    axes = "; ".join(f"{axis} {what}" for axis, what in choice.axes)
    moves = "; ".join(f"{move.operand}: {move.before} → {move.after}" for move in choice.moves) or "nothing"
    cells = [tag("th", state, scope="row"), tag("td", axes), tag("td", tag("code", moves))]
    numbers = (bytes_text(choice.bytes), seconds_text(choice.seconds))
    return tag("tr", *cells, *(tag("td", text, class_="number") for text in numbers), class_=state)
