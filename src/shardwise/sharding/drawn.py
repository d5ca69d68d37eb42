"""The drawings of tensors, specs and plans in notebooks; `shardwise.debug` makes them."""

from __future__ import annotations

from collections.abc import Callable

_draw: Callable[[object], str] | None = None


class Drawn:
    """Draws itself in notebooks."""

    __slots__ = ()

    def _repr_html_(self: object) -> str | None:
        """Return the drawing for a notebook, or None without a drawing function."""
        return None if _draw is None else _draw(self)


def draw_in_notebooks(draw: Callable[[object], str]) -> None:
    """Set the function that draws values in notebooks."""
    global _draw
    _draw = draw
