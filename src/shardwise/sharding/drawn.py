"""Drawings of tensors, specs and plans in notebooks. `shardwise.debug` sets the function that draws."""

from __future__ import annotations

from collections.abc import Callable

_draw: Callable[[object], str] | None = None


class Drawn:
    """Base class of values that notebooks show as drawings."""

    __slots__ = ()

    def _repr_html_(self: object) -> str | None:
        """Return the drawing for a notebook, or None without a drawing function."""
        return None if _draw is None else _draw(self)


def draw_in_notebooks(draw: Callable[[object], str]) -> None:
    """Set the function that draws values in notebooks."""
    global _draw
    _draw = draw
