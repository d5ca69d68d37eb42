"""Groups of any ranks, made by their members when they first communicate: for tensors that change their mesh.

The groups of a mesh are made by all ranks, when it is adopted. Here the ranks of two meshes talk to each other, and
others need not know. The name of a group is made from its ranks, so that its members agree on it. They make their
groups in the order in which they need them; programs in which all members make the same calls have one such order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from .._torch.c10d import group_of_members
from .._torch.collectives import group_named
from .._torch.modes import without_modes
from ..sharding.mesh import GROUP_TEXTS, world_group_name
from ..sharding.runtime import WorldState, runtime_of_world
from ..world import current_world, register_group

Parts = tuple[tuple[int, ...], ...]
"""Sets of ranks that have no rank in common, each in ascending order."""


class RankGroup(NamedTuple):
    """A group of ranks, or in a simulated world several that communicate at once."""

    name: str
    parts: Parts
    here: tuple[int, ...]
    """The ranks that this process runs: its own, or all of them in a simulated world; none outside the group."""

    @property
    def simulated(self) -> bool:
        """Whether this process runs all ranks."""
        return current_world() is not None

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank talks to, and itself, in group order."""
        return next(part for part in self.parts if rank in part)


# Not a cache that forgets: groups live as long as their world, and members must find or make one at the same time.
_GROUPS: WorldState[dict[Parts, RankGroup]] = WorldState(dict)


def group_over(parts: Sequence[Sequence[int]]) -> RankGroup:
    """Return the group of these ranks, created by its members on first use; in a process, the one that it is in."""
    key = tuple(tuple(sorted(part)) for part in parts)
    groups = _GROUPS.of(runtime_of_world())
    found = groups.get(key)
    if found is None:
        with without_modes():
            found = groups[key] = _make(key)
    return found


def _make(parts: Parts) -> RankGroup:
    ranks = tuple(sorted(rank for part in parts for rank in part))
    text = f"{len(ranks)} ranks"
    if current_world() is not None:
        name = f"shardwise:{_digest(parts)}"
        register_group(name, parts)
        GROUP_TEXTS.of(runtime_of_world())[name] = text
        return RankGroup(name, parts, ranks)
    here = dist.get_rank()
    own = next((part for part in parts if here in part), ())
    if not own:
        return RankGroup("", parts, ())
    if len(own) == dist.get_world_size():
        return RankGroup(world_group_name(), parts, (here,))
    name = named_group(own)
    GROUP_TEXTS.of(runtime_of_world())[name] = text
    return RankGroup(name, parts, (here,))


def named_group(ranks: tuple[int, ...]) -> str:
    """Return the name of the process group of these ranks, in this order, created by its members if needed."""
    name = f"shardwise:{_digest((ranks,))}"
    try:
        group_named(name)
    except (RuntimeError, LookupError, ValueError):
        group_of_members(ranks, name)
    return name


def _digest(parts: Parts) -> str:
    return hashlib.sha1(repr(parts).encode(), usedforsecurity=False).hexdigest()
