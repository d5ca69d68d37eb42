"""Local code that knows its shard's offset: algorithms for ops whose cut dim the op itself looks along.

A kernel is a generator. It computes on a rank's local tensors and yields its communication as data (`requests`); the
driver (`drive`) carries it out, for one rank in a real process, for all ranks in lockstep when simulated.
"""

from collections.abc import Callable
from typing import Any

from .requests import Cut, Fetch, Gather, Kernel, KernelRun, LocalCall, Reduce, Return

LOCAL: dict[str, Callable[[LocalCall], Any]] = {}
"""Ops with an implementation of their own for a rank's part, whatever is cut, by the key of their rule."""

__all__ = ["LOCAL", "Cut", "Fetch", "Gather", "Kernel", "KernelRun", "LocalCall", "Reduce", "Return"]
