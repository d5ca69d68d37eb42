"""Distributed tensors from known values, and back, without communication.

All of it is computed from `spec.layout.runs`, the global index ranges that each rank holds. On a Partial axis every
rank has different operands, of both signs, so that a missing, repeated or misordered reduction changes the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt
from ..errors import WorldError
from ..sharding.layout import Coordinate, Layout, PartialAxes
from ..sharding.memory_order import has_memory_order_of
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Placements
from ..sharding.spec import DTensorSpec, contiguous_meta
from ..tensor.dtensor import DTensor
from ..world import RankTensor
from .partial_operands import operands, wide_dtype

Key = tuple[int, ...]
"""A rank's indices on the Partial axes, outermost first."""


def make_dtensor(value: Tensor, mesh: DeviceMesh, placements: Placements, *, seed: int) -> DTensor:
    """Return the distributed tensor with this value and these placements, which may be `Partial` by any op.

    Integer values are exact in any dtype: the operands of a Partial are integers (or, in a product, powers of two). All
    ranks pass the same value and seed. In a simulated world, where a submesh has several parallel instances, `value`
    may be a RankTensor with a value for each instance.

    >>> x = make_dtensor(torch.arange(6), mesh, [Shard(0), Partial()], seed=0)
    >>> x.spec, torch.equal(x.full_tensor(), torch.arange(6))
    (i64[6@dp] sum(tp), True)
    """
    mesh_info = adopt(mesh)
    return with_spec(
        value, DTensorSpec(mesh_info.mesh, placements, contiguous_meta(value.shape, value.dtype)), seed=seed
    )


def with_spec(value: Tensor, spec: DTensorSpec, *, seed: int) -> DTensor:
    """Return the distributed tensor with this value and spec, also for layouts that placements cannot express."""
    mesh_info = spec.mesh_info
    if mesh_info.simulated:
        values = value.shards if isinstance(value, RankTensor) else (value,) * len(mesh_info.ranks)
        tables: dict[int, dict[Key, Tensor]] = {}
        shards: list[Tensor] = []
        for place, (rank, at) in enumerate(zip(mesh_info.ranks, mesh_info.coordinates, strict=True)):
            instance = _instance_of(mesh_info, rank)
            if instance not in tables:
                tables[instance] = _operand_table(values[place], spec.layout, seed)
            shards.append(_shard(tables[instance], spec.layout, at))
        return DTensor(RankTensor(shards), spec)
    assert mesh_info.coordinate is not None, "an adopted mesh holds this rank"
    return DTensor(_shard(_operand_table(value, spec.layout, seed), spec.layout, mesh_info.coordinate), spec)


def assemble(dtensor: DTensor, *, instance: int | None = None) -> Tensor:
    """Return the global value of a tensor in a simulated world, assembled from its shards without communication.

    Raises AssertionError if the shape, dtype or strides of a shard do not match the spec, if replicas differ, or if no
    rank holds an element. Nested Partial axes are reduced from the innermost (rightmost) outwards. On a submesh all
    parallel instances must agree, unless `instance` chooses one.

    >>> x = make_dtensor(torch.arange(6), mesh, [Shard(0), Partial()], seed=0)
    >>> assemble(x)
    tensor([0, 1, 2, 3, 4, 5])
    """
    spec, local = dtensor._spec, dtensor._local_shard
    if not isinstance(local, RankTensor):
        raise WorldError("assemble needs the shards of all ranks", "call x.full_tensor() outside a simulated world")
    by_instance = spec.mesh_info.instances.flatten(1).tolist()
    chosen = by_instance if instance is None else [by_instance[instance]]
    values = [_assemble_ranks(ranks, local.shards, spec) for ranks in chosen]
    for ranks, value in zip(chosen[1:], values[1:], strict=True):
        _check(same(value, values[0]), f"{spec!r}: ranks {ranks} hold another value than ranks {chosen[0]}")
    return values[0]


# ---- shards of a value -----------------------------------------------------------------------------------------------


def _operand_table(value: Tensor, layout: Layout, seed: int) -> dict[Key, Tensor]:
    """Return the global operand for every index on the Partial axes. Outer axes, to the left, split first."""
    generator = torch.Generator().manual_seed(seed)
    # Averages may be taken before or after sums: both are exact if operands differ by multiples of the divisor.
    unit = math.prod(layout.mesh_sizes[axis] for axis, op in layout.partial if op == "avg")
    table: dict[Key, Tensor] = {(): value.detach()}
    for axis, op in layout.partial:
        table = {
            (*key, index): part
            for key, operand in table.items()
            for index, part in enumerate(operands(operand, layout.mesh_sizes[axis], op, generator, unit))
        }
    return table


def _shard(table: dict[Key, Tensor], layout: Layout, at: Coordinate) -> Tensor:
    """Return a copy of the shard of the rank at this coordinate."""
    part = table[_key(layout.partial, at)]
    for dim, index in enumerate(_indices(layout, at)):
        part = _as_bytes(part).index_select(dim, index.to(part.device)).view(part.dtype)
    return part.clone(memory_format=torch.contiguous_format)


# ---- the value of shards ------------------------------------------------------------------------------------------


def _assemble_ranks(ranks: Sequence[int], shards: Sequence[Tensor], spec: DTensorSpec) -> Tensor:
    layout, globals_, seen = spec.layout, dict[Key, Tensor](), dict[Key, Tensor]()
    for rank in ranks:
        place = spec.mesh_info.ranks.index(rank)
        at, shard = spec.mesh_info.coordinates[place], shards[place]
        expected = spec.local_shape(at)
        _check(tuple(shard.shape) == expected, f"{spec!r}: rank {rank} has {list(shard.shape)}, not {list(expected)}")
        _check(shard.dtype == spec.dtype, f"{spec!r}: rank {rank} has {shard.dtype}, not {spec.dtype}")
        check_strides(shard, spec, rank)
        key = _key(layout.partial, at)
        if key not in globals_:
            globals_[key] = torch.zeros(spec.shape, dtype=spec.dtype, device=shard.device)
            seen[key] = torch.zeros(spec.shape, dtype=torch.bool, device=shard.device)
        if shard.numel() == 0:
            continue
        where = _grid(layout, at)
        held = _as_bytes(globals_[key])[where].view(spec.dtype)
        agrees = _equal(held, shard) | ~seen[key][where]
        _check(bool(agrees.all()), f"{spec!r}: rank {rank} differs from a rank that holds the same elements")
        _as_bytes(globals_[key])[where] = _as_bytes(shard)
        seen[key][where] = True
    for key, mask in seen.items():
        _check(bool(mask.all()), f"{spec!r}: no rank holds {(~mask).nonzero().tolist()[:4]} of operand {key}")
    return _reduced(globals_, layout.partial, spec.dtype)


def check_strides(shard: Tensor, spec: DTensorSpec, rank: int) -> None:
    """Raise AssertionError if the shard of a rank has not the memory order that the spec gives the global tensor."""
    expected = f"{spec!r} with strides {list(spec.stride)}"
    has = f"{list(shard.shape)} with strides {list(shard.stride())}"
    _check(has_memory_order_of(shard, spec.tensor_meta), f"{expected}: rank {rank} has {has}")


def _reduced(table: dict[Key, Tensor], partial: PartialAxes, dtype: torch.dtype) -> Tensor:
    """Reduce operands: inner axes first, in a wide dtype, rounded once at the end."""
    if not partial:
        return table[()]
    wide = {key: part if dtype is torch.bool else part.to(wide_dtype(dtype)) for key, part in table.items()}
    for _, op in reversed(partial):
        grouped: dict[Key, list[Tensor]] = {}
        for key in sorted(wide):
            grouped.setdefault(key[:-1], []).append(wide[key])
        wide = {key: _reduce(torch.stack(parts), op) for key, parts in grouped.items()}
        if not (dtype.is_floating_point or dtype.is_complex):  # integers that overflow wrap around at every reduction
            wide = {key: part.to(dtype).to(part.dtype) for key, part in wide.items()}
    return wide[()].to(dtype)


def _reduce(stacked: Tensor, op: str) -> Tensor:
    if stacked.dtype is torch.bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    if op == "sum":
        return stacked.sum(0)
    if op == "avg":
        return stacked.mean(0)
    if op == "product":
        return stacked.prod(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and values; NaN equals NaN."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(_equal(one, other).all())


def _equal(one: Tensor, other: Tensor) -> Tensor:
    if one.dtype.is_floating_point and one.dtype.itemsize == 1:  # float8 cannot be compared
        one, other = one.float(), other.float()
    return (one == other) | ((one != one) & (other != other))


# ---- index arithmetic --------------------------------------------------------------------------------------------


def _instance_of(mesh_info: MeshInfo, rank: int) -> int:
    return int((mesh_info.instances.flatten(1) == rank).any(1).nonzero().item())


def _key(partial: PartialAxes, at: Coordinate) -> Key:
    return tuple(at[axis] for axis, _ in partial)


def _indices(layout: Layout, at: Coordinate) -> list[Tensor]:
    """Return for each dim the global indices that the rank at this coordinate holds, in local order."""
    return [
        torch.tensor([*itertools.chain(*itertools.starmap(range, runs))], dtype=torch.int64) for runs in layout.runs(at)
    ]


@lru_cache(maxsize=4096)
def _grid(layout: Layout, at: Coordinate) -> tuple[Tensor, ...]:
    """Return the indices of all dims, shaped to index the global tensor."""
    indices = _indices(layout, at)
    shape = [1] * len(indices)
    return tuple(index.view(*shape[:dim], -1, *shape[dim + 1 :]) for dim, index in enumerate(indices))


_INDEXED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _as_bytes(tensor: Tensor) -> Tensor:
    """View dtypes that PyTorch cannot index as dtypes that it can."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor.view(_INDEXED_AS.get(tensor.dtype, tensor.dtype))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
