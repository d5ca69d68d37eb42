"""Passes over a recording. Each takes the graph, changes it, and returns how many nodes it removed, joined or moved.

dead        remove ops whose results are not read
duplicates  remove ops whose result an earlier op has computed
views       merge views of views, and remove views that change nothing
copies      remove copies of memory that is not read again, and merge copies of copies
overlap     start collectives where their inputs are ready, and wait for them where their results are read
buckets     join small all-reduces of one group
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
