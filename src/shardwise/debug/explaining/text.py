"""An explanation as text."""

from __future__ import annotations

from ...comm.plan import bytes_text
from .records import Choice, Communication, RecordedExplanation, Total

_MOST_SHOWN = 3


def explanation_text(sent: RecordedExplanation) -> str:
    """Return the text of an explanation: a headline, then each collective with its reason, in order.

    Collectives that repeat an earlier one, as in a loop, are counted there and not printed again.
    """
    lines = [_headline(sent.total)]
    repeated: dict[tuple[object, ...], list[Communication]] = {}
    for each in sent.communications:
        repeated.setdefault(_alike(each), []).append(each)
    for members in repeated.values():
        lines += ["", *_one(members[0], len(members))]
    return "\n".join(lines)


def _headline(total: Total) -> str:
    if not total.count:
        return "nothing is communicated"
    noun = "collective" if total.count == 1 else "collectives"
    return f"{total.count} {noun}, {bytes_text(total.bytes)} received by a rank, {seconds_text(total.seconds)} modelled"


def _alike(each: Communication) -> tuple[object, ...]:
    return each.kind, each.group, each.bytes, each.phase, each.modules, each.line, each.cause, each.op, each.reason


def _one(each: Communication, times: int) -> list[str]:
    often = f"   {times} times" if times > 1 else ""
    head = (
        f"{each.number}. {each.kind} over {each.group}   {bytes_text(each.bytes)}, {seconds_text(each.seconds)}{often}"
    )
    if each.line is not None:
        head += f"\n   {each.line}   {each.line.text}"
    where = f"{each.phase} of {each.module}" if each.module != "Global" else each.phase
    lines = [head, f"   {where}{f', {each.op}' if each.op else ''}{_rule(each)}", f"   why      {each.reason}"]
    for choice in each.rejected[:_MOST_SHOWN] if each.cause in ("operand", "kernel") else ():
        lines.append(f"   or       {choice_text(choice)}")
    if each.edit is not None:
        first, *rest = each.edit.splitlines()
        lines += [f"   instead  {first}", *(f"            {line}" for line in rest)]
    return lines


def _rule(each: Communication) -> str:
    return f": {each.rule.partition(': ')[2].partition(' ;')[0]}" if each.rule else ""


def choice_text(choice: Choice) -> str:
    """Return a choice as one line: what the axes do, what is moved, and the price."""
    does = ", ".join(f"{axis} {what}" for axis, what in choice.axes)
    moved = [f"{move.operand} {move.before} -> {move.after} {bytes_text(move.bytes)}" for move in choice.moves]
    parts = "; ".join(moved) or "moves nothing"
    extra = [(choice.kernel_seconds, "inside the op"), (choice.later_seconds, "to reduce it later")]
    parts += "".join(f", {seconds_text(seconds)} {what}" for seconds, what in extra if seconds)
    return f"{does}: {parts}   {seconds_text(choice.seconds)}"


def seconds_text(seconds: float) -> str:
    """Return a time with a unit: `561 us`, `1.2 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
