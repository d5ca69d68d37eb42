"""The colours of collectives."""

from __future__ import annotations

from ...drawing.markup import Markup, join, tag

KINDS = {
    "compute": "compute",
    "all-gather": "gather",
    "reduce-scatter": "scatter",
    "all-reduce": "reduce",
    "all-to-all": "exchange",
}
"""The class in page.css of each kind; others are "other"."""


def kind_class(kind: str) -> str:
    """Return the class that colours a kind."""
    return KINDS.get(kind, "other")


def kind_markup(kind: str) -> Markup:
    """Return a kind with its colour."""
    return join([tag("span", "", class_=f"kind {kind_class(kind)}"), kind])
