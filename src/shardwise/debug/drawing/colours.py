"""Colours of ranks and shards.

They are translucent, and text keeps the colour of the page: both can be read on light and on dark ground.
"""

from __future__ import annotations

_GOLDEN_ANGLE = 137.508


def ground(index: int) -> str:
    """Return the style of a cell with the colour of this number; neighbouring numbers have very different ones."""
    hue = (205 + index * _GOLDEN_ANGLE) % 360
    return f"background:hsla({hue:.0f},75%,52%,.26);box-shadow:inset 0 0 0 1px hsla({hue:.0f},60%,50%,.75)"


def axis_colour(axis: int) -> str:
    """Return the colour of a mesh axis."""
    return f"hsl({(205 + axis * _GOLDEN_ANGLE) % 360:.0f},65%,52%)"


PLAIN = "background:hsla(220,10%,50%,.14);box-shadow:inset 0 0 0 1px hsla(220,10%,50%,.45)"
MUTED = "opacity:.68"
MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
