"""Numbers of ranks in a program for local tensors: `dist.get_rank()` is each rank's own number.

Simulated ranks run in lockstep, so a rank's number is one integer with a value for each rank, as sizes that differ are
(`world/rank_int.py`). Slices, arithmetic and `torch.manual_seed` work with it. A branch on it raises an error, since
ranks would take different branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.symint import NumberNode, make_symint
from ..errors import WorldError
from ..sharding.source_lines import called_by_user
from ..world import groups_of
from ..world.generators import seed_ranks
from ..world.rank_int import RankIntNode, values_of
from .ranks import Axes

__all__ = ["rank_numbers"]


class RankNumberNode(RankIntNode):
    """The node of a rank's number. Comparisons are made for each rank, also with 0 and 1 (see `rank_int.py`)."""

    __slots__ = ()

    def wrap_int(self, number: int) -> RankNumberNode:
        return RankNumberNode((number,) * len(self.values))

    def apply(self, operation: Callable[..., Any]) -> RankNumberNode:
        return RankNumberNode(tuple(map(operation, self.values)))

    def combine(self, operation: Callable[..., Any], other: NumberNode) -> RankNumberNode:
        return RankNumberNode(tuple(map(operation, self.values, self._values_of(other))))

    def compare(self, operation: Callable[..., bool], other: NumberNode) -> RankNumberNode:
        return RankNumberNode(tuple(map(operation, self.values, self._values_of(other))))

    def value(self, what: str) -> int:
        first = self.values[0]
        if any(value != first for value in self.values):
            raise WorldError(
                f"the program branches on the number of a rank, but simulated ranks run in lockstep: {self}",
                "slice with it (x[rank * n : (rank + 1) * n], x.narrow, x.select) or compute with it "
                "(x * (rank == 0)), or let shardwise.distribute_tensor(x, mesh, placements).to_local() take the shard",
            )
        return first


def _number(values: list[int]) -> int | torch.SymInt:
    return values[0] if len(set(values)) == 1 else make_symint(RankNumberNode(tuple(values)))


@contextmanager
def rank_numbers(axes: Axes) -> Iterator[None]:
    """Let `get_rank()` and the like return each rank's own number to the user's code, and rank 0's to libraries."""
    places = axes.coordinates()

    def number_in(group: dist.ProcessGroup | None) -> int | torch.SymInt:
        groups = groups_of(group.group_name if group is not None else dist.group.WORLD.group_name)  # type: ignore[union-attr]
        found = {rank: ranks.index(rank) for ranks in groups for rank in ranks}
        return _number([found.get(rank, -1) for rank in range(len(places))])

    def get_rank(group: dist.ProcessGroup | None = None) -> int | torch.SymInt:
        return number_in(group) if called_by_user(directly=True) else originals["get_rank"](group)

    def get_local_rank(self: DeviceMesh, mesh_dim: int | str | None = None) -> int | torch.SymInt:
        if not called_by_user(directly=True):
            return originals["get_local_rank"](self, mesh_dim)
        return number_in(self.get_group(mesh_dim) if self.ndim > 1 or mesh_dim is not None else self.get_group())

    def get_coordinate(self: DeviceMesh) -> tuple[int | torch.SymInt, ...] | None:
        if not called_by_user(directly=True):
            return originals["get_coordinate"](self)
        return tuple(number_in(self.get_group(dim)) for dim in range(self.ndim))

    originals: dict[str, Callable[..., Any]] = {
        "get_rank": dist.get_rank,
        "get_local_rank": DeviceMesh.get_local_rank,
        "get_coordinate": DeviceMesh.get_coordinate,
        "mesh_rank": DeviceMesh.get_rank,
    }

    def mesh_rank(self: DeviceMesh) -> int | torch.SymInt:
        return number_in(None) if called_by_user(directly=True) else originals["mesh_rank"](self)

    manual_seed = torch.manual_seed

    def seed(value: int) -> torch.Generator:
        seeds = values_of(value)
        seed_ranks(torch.default_generator, seeds)
        return manual_seed(value if seeds is None else seeds[0])

    _set(get_rank, get_local_rank, get_coordinate, mesh_rank)
    torch.manual_seed = torch.random.manual_seed = seed  # type: ignore[assignment]
    try:
        yield
    finally:
        _set(*originals.values())
        torch.manual_seed = torch.random.manual_seed = manual_seed
        seed_ranks(torch.default_generator, None)


def _set(get_rank: Any, get_local_rank: Any, get_coordinate: Any, mesh_rank: Any) -> None:
    dist.get_rank = dist.distributed_c10d.get_rank = get_rank
    DeviceMesh.get_local_rank = get_local_rank  # type: ignore[method-assign]
    DeviceMesh.get_coordinate = get_coordinate  # type: ignore[method-assign]
    DeviceMesh.get_rank = mesh_rank  # type: ignore[method-assign]
