"""Which simulated world is running, and what its process groups mean to each of its ranks.

In a simulated world this process stands for rank 0, so PyTorch knows rank 0's group alone. Along one mesh
axis there is one such group per row of the mesh, all working at once: a group's name stands for all of them.

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
    """A number of ranks that run in this process, and their groups by name."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise WorldError(f"a world of {size} ranks", "a world has one rank or more")
        self.size = size
        self.groups: dict[str, Groups] = {}


active: list[World] = []
"""The running worlds, outermost first."""


def current_world() -> World | None:
    """The innermost running simulated world, if any."""
    return active[-1] if active else None


def _running(what: str) -> World:
    if not active:
        raise WorldError(f"{what} outside a simulated world", "do it inside `with shardwise.simulate(...)`")
    return active[-1]


def register_group(name: str, groups: Sequence[Sequence[int]]) -> None:
    """Say which ranks work together under `name`: a partition of (some of) the ranks into parallel groups."""
    world = _running(f"group {name!r} registered")
    parts = tuple(tuple(int(rank) for rank in group) for group in groups)
    ranks = [rank for group in parts for rank in group]
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world.size)):
        raise WorldError(
            f"group {name!r} as {parts} in a world of {world.size} ranks",
            f"each rank in [0, {world.size - 1}] may be in one of the parallel groups",
        )
    world.groups[name] = parts


def groups_of(name: str) -> Groups:
    """The parallel groups that `name` stands for."""
    world = _running(f"communication in group {name!r}")
    try:
        return world.groups[name]
    except KeyError:
        raise WorldError(
            f"group {name!r} belongs to no simulated mesh",
            "in a simulated world ranks communicate along the axes of a mesh made in that world; "
            "for a group made by hand call `register_group` with the ranks of all its parallel instances",
        ) from None
