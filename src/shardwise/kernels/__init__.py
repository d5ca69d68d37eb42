"""Local code that knows its shard's offset: algorithms for ops whose cut dim the op itself looks along.

A kernel is a generator. It computes on a rank's local tensors and yields its communication as data (`requests`); the
driver (`drive`) carries it out, for one rank in a real process, for all ranks in lockstep when simulated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .requests import Cut, Fetch, Gather, Kernel, KernelRun, LocalCall, Reduce, Return

LOCAL: dict[str, Callable[[LocalCall], Any]] = {}
"""Ops with an implementation of their own for a rank's part, whatever is cut without a kernel, by their rule's key."""

ONLY_SUMMED: set[str] = set()
"""Those of them that differ from the op only where a sum over a cut dim is left Partial."""

ONLY_EMPTY: set[str] = set()
"""Those of them that differ from the op only on parts without elements."""

COPIED: set[str] = set()
"""Those of them that are views, but whose local implementation makes a copy."""

DRAWS: dict[str, Callable[[LocalCall], Any]] = {}
"""Ops that draw random numbers, as LOCAL; their argument `generator` is a key that all ranks have in common."""


class ListKernel(NamedTuple):
    """A kernel for lists of tensors: `run(call, cut)`, where arguments that are lists hold the elements cut alike.

    It may return a dict: values, the same on all ranks, for plain tensors among its arguments. With `whole_mesh` all
    ranks of the mesh take part whatever is cut.
    """

    run: Callable[..., KernelRun]
    whole_mesh: bool = False


LISTS: dict[str, ListKernel] = {}
"""Ops on lists of tensors that communicate for the whole list at once, by the key of their rule."""

__all__ = [
    "COPIED",
    "DRAWS",
    "LISTS",
    "LOCAL",
    "ONLY_EMPTY",
    "ONLY_SUMMED",
    "Cut",
    "Fetch",
    "Gather",
    "Kernel",
    "KernelRun",
    "ListKernel",
    "LocalCall",
    "Reduce",
    "Return",
]

# The families register their kernels.
from . import (  # noqa: E402, F401
    attention,
    batch_norm,
    conjugate,
    conv,
    extremes,
    indexing,
    loss,
    norm,
    optim,
    random,
    reduce,
    resize,
    scan,
    shapes,
    softmax,
    sparse,
    sparse_gradients,
)
