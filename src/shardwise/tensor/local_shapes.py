"""The local shapes of the ranks: exchanged, checked against a global shape, or combined into one.

A process knows only the shape of its own shard. It asks the other ranks (one small collective, and a host read) with
`run_check=True` or inside `debug.check_local_tensors()`. In a simulated world all shapes are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.fake_tensors import in_fake_mode
from .._torch.symbols import specialized, symbolic
from ..comm.exchange import all_gather_ranks
from ..errors import LayoutError, ShapeError
from ..sharding.from_placements import resolve_placements
from ..sharding.memory_order import contiguous_stride
from ..sharding.mesh import MeshInfo
from ..sharding.placement import AnyShard, Placement, Replicate, ShardOrder
from ..world import RankTensor

_MAX_DIMS = 64
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class LocalShapes:
    """The local shapes that this process knows: those of all ranks if simulated or with `ask`, else its own.

    `given` is the `shape=` that this rank passed to `from_local`, and `requires_grad` that of the local tensor before
    it was detached. `fingerprint` returns a hash of a local tensor's data, exchanged to compare replicas.
    """

    def __init__(
        self,
        local: Tensor,
        mesh_info: MeshInfo,
        ask: bool,
        given: Sequence[int] | None = None,
        requires_grad: bool = False,
        fingerprint: Callable[[Tensor], int] = lambda local: 0,
    ) -> None:
        self.mesh_info = mesh_info
        self.given: dict[int, tuple[int, ...]] = {}
        self.fingerprints: dict[int, int] = {}
        self.requires_grad: dict[int, bool] = {}
        if isinstance(local, RankTensor):
            shards = dict(zip(mesh_info.ranks, local.shards, strict=True))
            self.shapes = {rank: specialized(tuple(shard.shape)) for rank, shard in shards.items()}
            self.dtypes = dict.fromkeys(self.shapes, local.dtype)
            self.memory_order = _memory_order(local.shards[0])
            self.fingerprints = {rank: fingerprint(shard) for rank, shard in shards.items()}
        elif ask and mesh_info.backend != "fake" and not mesh_info.outside and not in_fake_mode():
            # The fake backend and fake tensors have no peers to ask.
            self._ask(local, given, requires_grad, fingerprint(local))
        else:
            self.shapes = {dist.get_rank(): symbolic(tuple(local.shape))}
            self.dtypes = {dist.get_rank(): local.dtype}
            self.memory_order = _memory_order(local)

    def _ask(self, local: Tensor, given: Sequence[int] | None, requires_grad: bool, fingerprint: int) -> None:
        """Exchange shape, dtype, memory order and the other arguments with the other ranks of the mesh."""
        lists = [local.shape, _memory_order(local), given or ()]
        row = [_DTYPES.index(local.dtype), fingerprint, int(requires_grad)]
        for values in lists:
            row += [len(values), *values, *[0] * (_MAX_DIMS - len(values))]
        device = local.device if not local.is_meta else self.mesh_info.device_type
        table = all_gather_ranks(torch.tensor(row, device=device), self.mesh_info).tolist()
        rank = dist.get_rank()
        instance = next(ranks for ranks in self.mesh_info.instances.flatten(1).tolist() if rank in ranks)
        self.dtypes = {rank: _DTYPES[row[0]] for rank, row in zip(instance, table, strict=True)}
        self.fingerprints = {rank: row[1] for rank, row in zip(instance, table, strict=True)}
        self.requires_grad = {rank: bool(row[2]) for rank, row in zip(instance, table, strict=True)}
        shapes, orders, given_shapes = (
            {rank: _list_at(row, 3 + i * (1 + _MAX_DIMS)) for rank, row in zip(instance, table, strict=True)}
            for i in range(len(lists))
        )
        self.shapes, self.given = shapes, given_shapes
        # The first rank has the largest shard: an empty or tiny one does not show the order.
        self.memory_order = orders[instance[0]]

    def check_alike(self) -> None:
        """Raise an error if dtype, number of dims, given global shape or requires_grad differ between ranks."""
        kinds = {rank: f"{self.dtypes[rank]} of {len(shape)} dims" for rank, shape in self.shapes.items()}
        if len(set(kinds.values())) > 1:
            raise ShapeError(
                f"from_local got local tensors that differ in dtype or number of dims: {_by_rank(kinds)}",
                "pass tensors of one dtype and one number of dims on all ranks",
            )
        if len(set(self.requires_grad.values())) > 1:
            kinds = {rank: f"one with requires_grad={required}" for rank, required in self.requires_grad.items()}
            raise ShapeError(
                f"from_local got local tensors that differ in requires_grad: {_by_rank(kinds)}",
                "call local.requires_grad_() on all ranks or on none, or pass local.detach()",
            )
        if len(set(self.given.values())) > 1:
            shapes = ", ".join(f"{list(shape)} on rank {rank}" for rank, shape in sorted(self.given.items()))
            raise ShapeError(
                f"from_local got different shapes for one tensor: {shapes}", "pass the same global shape= on all ranks"
            )

    def even_shape(self, order: ShardOrder) -> torch.Size:
        """Return the global shape if all ranks have shards of the first one's shape."""
        size = list(next(iter(self.shapes.values())))
        for dim, axes in order:
            size[dim] *= math.prod(self.mesh_info.sizes[axis] for axis in axes)
        return torch.Size(size)

    def sum_of_shapes(self, placements: Sequence[Placement]) -> torch.Size:
        """Return the global shape: along each sharded dim, the sum of the local sizes of the ranks along its axes."""
        first = next(iter(self.shapes))
        size = list(self.shapes[first])
        for dim in range(len(size)):
            axes = [axis for axis, p in enumerate(placements) if isinstance(p, AnyShard) and p.dim == dim]
            size[dim] = sum(self.shapes[rank][dim] for rank in self._peers(first, axes))
        return torch.Size(size)

    def knows_all(self) -> bool:
        """Return whether the shapes of other ranks are known."""
        return len(self.shapes) > 1

    def check_replicas(self, placements: Sequence[Placement]) -> None:
        """Raise an error if local tensors differ along an axis on which they should be replicated."""
        mesh_info = self.mesh_info
        for axis, placement in enumerate(placements):
            for ranks in mesh_info.rank_groups((axis,)) if isinstance(placement, Replicate) else ():
                known = [rank for rank in ranks if rank in self.fingerprints]
                others = [rank for rank in known if self.fingerprints[rank] != self.fingerprints[known[0]]]
                if others:
                    raise ShapeError(
                        f"from_local got local tensors as replicated over {mesh_info.names[axis]}, but "
                        f"rank {others[0]} holds other values than rank {known[0]}",
                        "pass the placements that they have, or run_check=True, which copies the first rank's data",
                    )

    def _peers(self, rank: int, axes: Sequence[int]) -> list[int]:
        """Return the ranks that differ from this one only on these axes."""
        groups = self.mesh_info.rank_groups(tuple(axes)) if axes else [[rank]]
        return next(group for group in groups if rank in group)

    def stride(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the global strides: without gaps, with the dims in the order that they have in local memory."""
        packed = contiguous_stride([shape[dim] for dim in self.memory_order])
        return tuple(packed[self.memory_order.index(dim)] for dim in range(len(shape)))

    def check(self, shape: torch.Size, placements: tuple[Placement, ...], order: ShardOrder, assumed: bool) -> None:
        """Raise an error for local shapes that do not follow from these placements and this global shape.

        `assumed` is whether the global shape was computed from one shard, as if all had the same shape.
        """
        mesh_info = self.mesh_info
        try:
            layout = resolve_placements(mesh_info.sizes, shape, placements, order)[0]
        except LayoutError as error:
            where = f"from_local got {list(placements)} for the global shape {list(shape)} over {mesh_info!r}"
            raise ShapeError(f"{where}: {error.problem}", error.fix) from None
        wrong = {}
        coordinates = dict(zip(mesh_info.ranks, mesh_info.coordinates, strict=True))
        for rank, held in self.shapes.items():
            at = coordinates.get(rank)
            expected = held if at is None else layout.local_shape(at)  # a rank outside the mesh may pass anything
            if tuple(held) != expected:
                wrong[rank] = f"{list(held)} instead of {list(expected)}"
        if not wrong:
            return
        if assumed:
            raise ShapeError(
                f"from_local without shape= assumes shards of equal shape, here those of a tensor of shape "
                f"{list(shape)} with the placements {list(placements)} over {mesh_info!r}, but {_by_rank(wrong)}",
                "pass shape=, the global shape, or run_check=True, which asks the ranks for their shapes",
            )
        raise ShapeError(
            f"from_local got local tensors that are not the shards of a tensor of shape {list(shape)} with the "
            f"placements {list(placements)} over {mesh_info!r}: {_by_rank(wrong)}",
            "pass the right shape=, shard as torch.chunk does, or use other placements",
        )


def _list_at(row: list[int], start: int) -> tuple[int, ...]:
    return tuple(row[start + 1 :][: row[start]])


def _by_rank(values: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} holds {value}" for rank, value in sorted(values.items()))


def _memory_order(local: Tensor) -> tuple[int, ...]:
    """Return the dims in the order of their strides, major to minor."""
    dims, strides = range(local.dim()), symbolic(local.stride())
    return tuple(dims) if local.is_contiguous() else tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))
