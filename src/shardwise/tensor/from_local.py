"""From local tensors to one distributed tensor: checks, and the global shape that local shapes imply.

A rank sees only its own shard. Unless the caller gives the global shape, the ranks exchange their local shapes (one
small collective), so that uneven shards are put together right or refused by all ranks alike, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.exchange import all_gather_ranks, broadcast_move
from ..comm.transport import check_reducible
from ..errors import InputError, LayoutError, ShapeError
from ..sharding.from_placements import from_placements
from ..sharding.memory_order import contiguous_stride
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Partial, Placement, Placements, Replicate, Shard, ShardOrder
from ..sharding.runtime import Runtime, WorldCache, on_activate
from ..sharding.spec import DTensorSpec, TensorMeta, normalize_placements
from ..world import RankTensor, replicate

_MAX_DIMS = 64
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def check_plain_tensor(tensor: object, caller: str) -> Tensor:
    """Refuse what cannot be distributed: other objects, and layouts other than strided."""
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
    def forward(ctx: object, tensor: Tensor, ranks: int) -> Tensor:
        return replicate(tensor, ranks)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[object, ...]:
        return grad, None


def copy_to_replicas(local: Tensor, mesh_info: MeshInfo, placements: Sequence[Placement]) -> Tensor:
    """Along every replicated axis, what its first rank holds."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate) and mesh_info.sizes[axis] > 1:
            local = broadcast_move(axis, 0, mesh_info, local.dtype)(local)
    return local


# ---- the spec -------------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What a caller of from_local says about the global tensor."""

    placements: Placements | None
    shape: Sequence[int] | None
    stride: Sequence[int] | None


_SPECS: WorldCache[object, DTensorSpec] = WorldCache("specs of local tensors", 8 << 20)


class _Active:
    """The specs of the active world that were used recently: what `spec_of_local` looks up first."""

    specs: ClassVar[dict[object, DTensorSpec]] = {}


def _use_specs_of(runtime: Runtime) -> None:
    _Active.specs = _SPECS.of(runtime).recent


on_activate(_use_specs_of)


def spec_of_local(
    local: Tensor,
    mesh_info: MeshInfo,
    placements: Placements | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
) -> DTensorSpec:
    """The spec of the global tensor whose shard each rank holds."""
    if type(placements) is list:
        placements = tuple(placements)
    if type(shape) is list:
        shape = tuple(shape)
    key: object = (mesh_info, placements, local.shape, local.stride(), local.dtype, shape, stride)
    try:
        found = None if run_check else _Active.specs.get(key)
    except TypeError:  # arguments of unexpected types, refused by name below
        key = found = None
    if found is not None:
        return found
    found = _make_spec(local, mesh_info, _Given(placements, shape, stride), run_check)
    asked = run_check or mesh_info.simulated or (shape is None and not _knows_shape(mesh_info, placements))
    if key is not None and not asked:
        _SPECS.of(mesh_info.runtime)[key] = found
    return found


def _knows_shape(mesh_info: MeshInfo, placements: Placements | None) -> bool:
    """Whether a rank's local shape implies the global shape: no dim is sharded, or there are no ranks to ask."""
    if mesh_info.backend == "fake" or placements is None:
        return True
    return isinstance(placements, (list, tuple)) and all(isinstance(p, (Replicate, Partial)) for p in placements)


def _make_spec(local: Tensor, mesh_info: MeshInfo, given: _Given, run_check: bool) -> DTensorSpec:
    placements, order = normalize_placements(mesh_info, given.placements, local.dim())
    check_reductions(placements, local.dtype)
    shape = _checked_shape(local, given)
    is_sharded = any(isinstance(p, Shard) and mesh_info.sizes[axis] > 1 for axis, p in enumerate(placements))
    shards = _LocalShapes(local, mesh_info, ask=run_check or (shape is None and is_sharded))
    if shards.asked:
        shards.check_alike()
    if shape is None:
        shape = shards.infer(placements)
    shards.check(shape, placements, order)
    stride = tuple(given.stride) if given.stride is not None else shards.stride(shape)
    return DTensorSpec(mesh_info.mesh, placements, TensorMeta(shape, stride, local.dtype), order)


def _checked_shape(local: Tensor, given: _Given) -> torch.Size | None:
    shape, stride = given.shape, given.stride
    if shape is not None:
        if not isinstance(shape, Sequence):
            raise InputError(f"from_local got shape={shape!r}", "give one size for each dim, e.g. shape=(8, 16)")
        if len(shape) != local.dim():
            raise ShapeError(
                f"a local tensor of {local.dim()} dims for a tensor of shape {list(shape)}",
                "give one size for each dim",
            )
    if stride is not None and shape is None:
        raise InputError("from_local got a stride without a shape", "give both, or neither")
    if stride is not None and len(stride) != local.dim():
        raise ShapeError(f"a stride {list(stride)} for a tensor of {local.dim()} dims", "give one stride for each dim")
    return None if shape is None else torch.Size(shape)


def _memory_order(local: Tensor) -> tuple[int, ...]:
    """The dims in the order of their strides, major to minor."""
    dims, strides = range(local.dim()), local.stride()
    return tuple(dims) if local.is_contiguous() else tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))


class _LocalShapes:
    """The local shapes of all ranks that this process knows: all when simulated or asked for, else its own."""

    def __init__(self, local: Tensor, mesh_info: MeshInfo, ask: bool) -> None:
        self.mesh_info = mesh_info
        self.asked = ask
        if isinstance(local, RankTensor):
            self.shapes = {rank: tuple(shard.shape) for rank, shard in enumerate(local.shards)}
            self.dtypes = dict.fromkeys(self.shapes, local.dtype)
            self.memory_order = _memory_order(local.shards[0])
        elif ask and mesh_info.backend != "fake":  # the fake backend has no peers to ask
            self._ask(local)
        else:
            self.shapes = {dist.get_rank(): tuple(local.shape)}
            self.dtypes = {dist.get_rank(): local.dtype}
            self.memory_order = _memory_order(local)

    def _ask(self, local: Tensor) -> None:
        """Exchange dtype, shape and memory order with the other ranks of the mesh."""
        padding = [0] * (_MAX_DIMS - local.dim())
        row = [_DTYPES.index(local.dtype), local.dim(), *local.shape, *padding, *_memory_order(local), *padding]
        message = torch.tensor(row, device=local.device)
        table = all_gather_ranks(message, self.mesh_info).tolist()
        rank = dist.get_rank()
        instance = next(ranks for ranks in self.mesh_info.instances.flatten(1).tolist() if rank in ranks)
        self.shapes = {rank: tuple(row[2 : 2 + row[1]]) for rank, row in zip(instance, table, strict=True)}
        self.dtypes = {rank: _DTYPES[row[0]] for rank, row in zip(instance, table, strict=True)}
        # That of the first rank, which holds the most: an empty or tiny shard does not show it.
        self.memory_order = tuple(table[0][2 + _MAX_DIMS :][: table[0][1]])

    def check_alike(self) -> None:
        """Refuse ranks whose dtype or number of dims differs from the others'."""
        kinds = {rank: f"{self.dtypes[rank]} of {len(shape)} dims" for rank, shape in self.shapes.items()}
        if len(set(kinds.values())) > 1:
            raise ShapeError(
                f"the local tensors differ in dtype or number of dims: {_by_rank(kinds)}",
                "make them alike on all ranks",
            )

    def infer(self, placements: Sequence[Placement]) -> torch.Size:
        """The global shape: along each sharded dim, the sum of what the ranks along its axes hold."""
        first = next(iter(self.shapes))
        size = list(self.shapes[first])
        for dim in range(len(size)):
            axes = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
            if len(self.shapes) == 1:  # nobody could be asked: all shards are alike
                size[dim] *= math.prod(self.mesh_info.sizes[axis] for axis in axes)
            else:
                size[dim] = sum(self.shapes[rank][dim] for rank in self._peers(first, axes))
        return torch.Size(size)

    def _peers(self, rank: int, axes: Sequence[int]) -> list[int]:
        """The ranks that differ from this one only on these axes."""
        groups = self.mesh_info.rank_groups(tuple(axes)) if axes else [[rank]]
        return next(group for group in groups if rank in group)

    def stride(self, shape: torch.Size) -> tuple[int, ...]:
        """The global stride: packed, with the dims in the order in which they lie in local memory."""
        packed = contiguous_stride([shape[dim] for dim in self.memory_order])
        return tuple(packed[self.memory_order.index(dim)] for dim in range(len(shape)))

    def check(self, shape: torch.Size, placements: Sequence[Placement], order: ShardOrder) -> None:
        """Refuse local shapes that these placements of this global shape do not give."""
        mesh_info = self.mesh_info
        try:
            layout = from_placements(mesh_info.sizes, shape, placements, order)
        except LayoutError as error:
            where = f"{list(placements)} on shape {list(shape)} over {mesh_info!r}"
            raise ShapeError(f"{where}: {error.problem}", error.fix) from None
        wrong = {}
        for rank, held in self.shapes.items():
            expected = layout.local_shape(mesh_info.coordinates[rank])
            if tuple(held) != expected:
                wrong[rank] = f"{list(held)} instead of {list(expected)}"
        if wrong:
            raise ShapeError(
                f"the local tensors are not the shards of a tensor of shape {list(shape)} placed by {list(placements)} "
                f"over {mesh_info!r}: {_by_rank(wrong)}",
                "pass the right shape=, shard as torch.chunk does, or use other placements",
            )


def _by_rank(values: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} holds {value}" for rank, value in sorted(values.items()))
