"""Which simulated world is running, and which ranks communicate in each of its process groups.

For PyTorch this process is rank 0 of a simulated world, and has rank 0's groups only. Along a mesh axis there is one
group per row of the mesh, and all of them communicate at once. So here the name of a group refers to all parallel
groups.

>>> with simulate(4):
...     register_group("columns", [(0, 2), (1, 3)])
...     groups_of("columns")
((0, 2), (1, 3))
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import WorldError

__all__ = ["Groups", "World", "active", "current_world", "groups_of", "register_group"]

Groups = tuple[tuple[int, ...], ...]


class World:
    """A number of simulated ranks, and their groups by name.

    >>> current_world().size
    4
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise WorldError(f"simulate got {size} ranks", "pass 1 or more")
        self.size = size
        self.groups: dict[str, Groups] = {}


active: list[World] = []
"""The running worlds, outermost first. All threads share them, as they share torch.distributed's default group."""


def current_world() -> World | None:
    """Return the innermost running simulated world, or None.

    >>> with simulate(8):
    ...     current_world().size
    8
    """
    return active[-1] if active else None


def _require_world(what: str) -> World:
    if not active:
        raise WorldError(f"{what} outside a simulated world", "call this inside `with shardwise.simulate(...)`")
    return active[-1]


def register_group(name: str, groups: Sequence[Sequence[int]]) -> None:
    """Define the parallel groups that `name` refers to: disjoint groups of ranks of the running world.

    >>> register_group("columns", [(0, 2), (1, 3)])
    """
    world = _require_world(f"group {name!r} registered")
    parallel = tuple(tuple(int(rank) for rank in group) for group in groups)
    ranks = [rank for group in parallel for rank in group]
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world.size)):
        raise WorldError(
            f"register_group({name!r}, {parallel}) in a world of {world.size} ranks",
            f"use ranks in [0, {world.size - 1}], each in one of the parallel groups at most",
        )
    world.groups[name] = parallel


def groups_of(name: str) -> Groups:
    """Return the parallel groups that `name` refers to.

    >>> groups_of(mesh.get_group("tp").group_name)
    ((0, 1), (2, 3))
    """
    world = _require_world(f"communication in group {name!r}")
    try:
        return world.groups[name]
    except KeyError:
        raise WorldError(
            f"group {name!r} belongs to no mesh of the running simulated world",
            "communicate along the axes of a mesh that was made in this world; or call "
            "`shardwise.world.register_group` with the ranks of all parallel instances of the group",
        ) from None
