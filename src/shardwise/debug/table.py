"""Tables drawn with box characters."""

from __future__ import annotations

from collections.abc import Sequence


def boxed(head: list[str], rows: list[list[str]]) -> str:
    """Return rows of cells under a head, with a frame."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str], left: str, between: str, right: str, fill: str = " ") -> str:
        padded = [f"{fill}{cell:{fill}<{width}}{fill}" for cell, width in zip(cells, widths, strict=True)]
        return left + between.join(padded) + right

    empty = [""] * len(head)
    body = [line(row, "│", "│", "│") for row in [head, *rows]]
    body.insert(1, line(empty, "├", "┼", "┤", "─"))
    return "\n".join([line(empty, "┌", "┬", "┐", "─"), *body, line(empty, "└", "┴", "┘", "─")])
