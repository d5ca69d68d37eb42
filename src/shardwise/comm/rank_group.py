"""Process groups of the ranks of two meshes, for tensors that change their mesh.

All ranks create the groups of a mesh, when it is adopted. The group of two meshes is created by its members alone, when
they first communicate. Its name is derived from its ranks, so that members agree on it. Members must need their groups
in the same order, as they do in programs in which all members make the same calls.
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
"""Disjoint sets of ranks, each in ascending order."""


class RankGroup(NamedTuple):
    """A process group; in a simulated world, several groups that communicate in one call."""

    name: str
    parts: Parts
    here: tuple[int, ...]
    """The ranks that this process runs: its own, or all of them in a simulated world; none outside the group."""

    @property
    def simulated(self) -> bool:
        """Whether this process simulates all ranks."""
        return current_world() is not None

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that this rank is in, in group order."""
        return next(part for part in self.parts if rank in part)


# Not a cache that forgets: groups live as long as their world, and members must find or make one at the same time.
_GROUPS: WorldState[dict[Parts, RankGroup]] = WorldState(dict)


def group_over(parts: Sequence[Sequence[int]]) -> RankGroup:
    """Return the group of these ranks; of several parts, the one that this process is in. Its members create it."""
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
