"""Passes over a recording. Each takes the graph, changes it, and returns how many nodes it removed, joined or moved.

dead        ops whose results nobody reads
duplicates  ops that compute again what is there
views       views of views, and views that change nothing
copies      copies of what nobody reads again, and copies of copies
overlap     collectives start where their inputs are ready, and are waited for where their results are read
buckets     small all-reduces of one group become one
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from .buckets import join_reductions
from .copies import merge_copies
from .overlap import overlap
from .simplify import remove_dead, remove_duplicates, simplify_views

PASSES: dict[str, Callable[[fx.Graph], int]] = {
    "duplicates": remove_duplicates,
    "views": simplify_views,
    "copies": merge_copies,
    "dead": remove_dead,
    "overlap": overlap,
    "buckets": join_reductions,
}
"""All passes, in the order in which they run."""

__all__ = ["PASSES"]
