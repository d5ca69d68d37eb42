"""Where local tensors become one distributed tensor: checks, and the global shape that local shapes imply.

A rank sees only its own part. Unless the caller says the global shape, the ranks tell each other their local shapes
(one small collective), so that uneven parts are put together right or refused by all ranks alike, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.moves import all_gather_ranks, broadcast_move
from ..comm.transport import check_reducible
from ..errors import InputError, LayoutError, ShapeError
from ..sharding.layout import from_placements
from ..sharding.mesh import MeshInfo
from ..sharding.placement import P, Partial, Placement, Placements, Replicate, Shard, ShardOrder
from ..sharding.spec import DTensorSpec, TensorMeta, contiguous_stride, normalize_placements
from ..world import RankTensor, replicate

_MAX_DIMS = 64
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def check_plain_tensor(tensor: object, caller: str) -> Tensor:
    """Refuse what cannot be cut: other objects, and layouts other than strided."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{caller} got a {type(tensor).__name__}", "pass a torch.Tensor")
    if tensor.layout != torch.strided:
        raise InputError(f"{caller} got a tensor of layout {tensor.layout}", "make it dense first: tensor.to_dense()")
    return tensor


def check_reductions(placements: Sequence[Placement], dtype: torch.dtype) -> None:
    """Refuse Partial placements that have no meaning for a dtype."""
    for placement in placements:
        if isinstance(placement, Partial):
            check_reducible(dtype, placement.reduce_op)


def on_mesh(tensor: Tensor, mesh_info: MeshInfo) -> Tensor:
    """The tensor on the mesh's device type; in the simulated world, one copy for every rank."""
    if tensor.device.type not in (mesh_info.device_type, "meta"):
        tensor = tensor.to(mesh_info.device_type)
    if mesh_info.simulated and not isinstance(tensor, RankTensor):
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _ToRanks.apply(tensor, mesh_info.world_size)
        tensor = replicate(tensor, mesh_info.world_size)
    return tensor


class _ToRanks(torch.autograd.Function):
    """One copy for every rank, and one gradient from every rank: each rank is a program with a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        return replicate(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


def spec_of_local(
    local: Tensor,
    mesh_info: MeshInfo,
    placements: Placements | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
) -> DTensorSpec:
    """The spec of the tensor whose part each rank holds."""
    plain = isinstance(placements, (list, tuple, P, NoneType)) and isinstance(shape, (tuple, list, NoneType))
    if run_check or mesh_info.simulated or not plain or (shape is None and not _alone(mesh_info, placements)):
        return _make_spec(local, mesh_info, placements, shape, stride, run_check)
    given = placements if placements is None or isinstance(placements, P) else tuple(placements)
    sizes = None if shape is None else tuple(shape), None if stride is None else tuple(stride)
    return _known_spec(mesh_info, given, local.shape, local.stride(), local.dtype, *sizes)


def _alone(mesh_info: MeshInfo, placements: Placements | None) -> bool:
    """Whether a rank's own shape tells the whole shape: nothing is cut, or there is nobody to ask."""
    if mesh_info.backend == "fake" or placements is None:
        return True
    return isinstance(placements, (list, tuple)) and all(isinstance(p, (Replicate, Partial)) for p in placements)


@lru_cache(maxsize=16384)
def _known_spec(
    mesh_info: MeshInfo,
    placements: Placements | None,
    local_shape: torch.Size,
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
) -> DTensorSpec:
    """As `_make_spec`, from the metadata of the local tensor alone."""
    local = torch.empty_strided(local_shape, local_stride, dtype=dtype, device="meta")
    return _make_spec(local, mesh_info, placements, shape, stride, run_check=False)


def _make_spec(
    local: Tensor,
    mesh_info: MeshInfo,
    placements: Placements | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
) -> DTensorSpec:
    normal, order = normalize_placements(mesh_info, placements, local.dim())
    meta = global_meta(local, mesh_info, normal, order, shape, stride, run_check)
    return DTensorSpec(mesh_info.mesh, normal, meta, order)


def global_meta(
    local: Tensor,
    mesh_info: MeshInfo,
    placements: Sequence[Placement],
    order: ShardOrder,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
) -> TensorMeta:
    """Shape, stride and dtype of the tensor whose part each rank holds."""
    check_reductions(placements, local.dtype)
    if shape is not None:
        if not isinstance(shape, Sequence):
            raise InputError(f"from_local got shape={shape!r}", "give one size for each dim, e.g. shape=(8, 16)")
        shape = torch.Size(shape)
        if len(shape) != local.dim():
            raise ShapeError(
                f"a local tensor of {local.dim()} dims for a tensor of shape {list(shape)}",
                "give one size for each dim",
            )
    if stride is not None and shape is None:
        raise InputError("from_local got a stride without a shape", "give both, or neither")
    if stride is not None and len(stride) != local.dim():
        raise ShapeError(f"a stride {list(stride)} for a tensor of {local.dim()} dims", "give one stride for each dim")
    parts = _LocalParts(local, mesh_info, ask=run_check or (shape is None and _is_cut(mesh_info, placements)))
    if parts.asked:
        parts.check_alike()
    if shape is None:
        shape = parts.infer(placements)
    parts.check(shape, placements, order)
    return TensorMeta(shape, tuple(stride) if stride is not None else parts.stride(shape), local.dtype)


def copy_to_replicas(local: Tensor, mesh_info: MeshInfo, placements: Sequence[Placement]) -> Tensor:
    """Along every replicated axis, what its first rank holds."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate) and mesh_info.sizes[axis] > 1:
            local = broadcast_move(axis, 0, mesh_info, local.dtype)(local)
    return local


def _is_cut(mesh_info: MeshInfo, placements: Sequence[Placement]) -> bool:
    return any(isinstance(p, Shard) and mesh_info.sizes[axis] > 1 for axis, p in enumerate(placements))


def _memory_order(local: Tensor) -> tuple[int, ...]:
    """The dims in the order in which they lie in memory, major to minor."""
    dims, strides = range(local.dim()), local.stride()
    return tuple(dims) if local.is_contiguous() else tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))


class _LocalParts:
    """The local shapes of all ranks this process knows of: all when simulated or asked for, else its own."""

    def __init__(self, local: Tensor, mesh_info: MeshInfo, ask: bool) -> None:
        self.mesh_info = mesh_info
        self.asked = ask
        if isinstance(local, RankTensor):
            shapes = [tuple(shard.shape) for shard in local.shards]
            ranks = range(mesh_info.world_size)
            self.shapes = {rank: shapes[rank] for rank in ranks}
            self.dtypes = dict.fromkeys(ranks, local.dtype)
            self.memory_order = _memory_order(local.shards[0])
        elif ask and mesh_info.backend != "fake":  # the fake backend has no peers to ask
            self._ask(local)
        else:
            self.shapes = {dist.get_rank(): tuple(local.shape)}
            self.dtypes = {dist.get_rank(): local.dtype}
            self.memory_order = _memory_order(local)

    def _ask(self, local: Tensor) -> None:
        padding = [0] * (_MAX_DIMS - local.dim())
        row = [_DTYPES.index(local.dtype), local.dim(), *local.shape, *padding, *_memory_order(local), *padding]
        message = torch.tensor(row, device=local.device)
        table = all_gather_ranks(message, self.mesh_info).tolist()
        instance = _my_instance(self.mesh_info)
        self.shapes = {rank: tuple(row[2 : 2 + row[1]]) for rank, row in zip(instance, table, strict=True)}
        self.dtypes = {rank: _DTYPES[row[0]] for rank, row in zip(instance, table, strict=True)}
        # Of the first rank, which holds the most: from a rank with little or nothing it cannot be told.
        self.memory_order = tuple(table[0][2 + _MAX_DIMS :][: table[0][1]])

    def check_alike(self) -> None:
        """Refuse ranks whose dtype or number of dims differs from the others'."""
        kinds = {rank: f"{self.dtypes[rank]} of {len(shape)} dims" for rank, shape in self.shapes.items()}
        if len(set(kinds.values())) > 1:
            raise ShapeError(
                f"the local tensors are not of one kind: {_by_rank(kinds)}", "make them alike on all ranks"
            )

    def infer(self, placements: Sequence[Placement]) -> torch.Size:
        """The global shape: along each cut dim, the sum of what the ranks along its axes hold."""
        first = next(iter(self.shapes))
        size = list(self.shapes[first])
        for dim in range(len(size)):
            axes = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
            if len(self.shapes) == 1:  # nobody could be asked: all parts are alike
                size[dim] *= math.prod(self.mesh_info.sizes[axis] for axis in axes)
            else:
                size[dim] = sum(self.shapes[rank][dim] for rank in self._row(first, axes))
        return torch.Size(size)

    def _row(self, rank: int, axes: Sequence[int]) -> list[int]:
        """The ranks that differ from this one only on these axes."""
        groups = self.mesh_info.rank_groups(tuple(axes)) if axes else [[rank]]
        return next(group for group in groups if rank in group)

    def stride(self, shape: torch.Size) -> tuple[int, ...]:
        """The global stride: packed, with the dims in the order in which they lie in local memory."""
        packed = contiguous_stride([shape[dim] for dim in self.memory_order])
        return tuple(packed[self.memory_order.index(dim)] for dim in range(len(shape)))

    def check(self, shape: torch.Size, placements: Sequence[Placement], order: ShardOrder) -> None:
        """Refuse local shapes that this cut of this global shape does not give."""
        try:
            layout = from_placements(self.mesh_info.sizes, shape, placements, order)
        except LayoutError as error:
            where = f"{list(placements)} on shape {list(shape)} over {self.mesh_info!r}"
            raise ShapeError(f"{where}: {error.problem}", error.fix) from None
        wrong = {}
        for rank, held in self.shapes.items():
            expected = layout.local_shape(self.mesh_info.coordinates[rank])
            if tuple(held) != expected:
                wrong[rank] = f"{list(held)} instead of {list(expected)}"
        if wrong:
            raise ShapeError(
                f"the local tensors are no cut of shape {list(shape)} by {list(placements)} over {self.mesh_info!r}: "
                f"{_by_rank(wrong)}",
                "pass the right shape=, cut as torch.chunk does, or use other placements",
            )


def _my_instance(mesh_info: MeshInfo) -> list[int]:
    rank = dist.get_rank()
    return next(row for row in mesh_info.instances.flatten(1).tolist() if rank in row)


def _by_rank(values: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} holds {value}" for rank, value in sorted(values.items()))
