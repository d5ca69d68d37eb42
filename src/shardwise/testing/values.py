"""Distributed tensors from known values, and back, without communication.

Everything here follows from `spec.layout.runs`, the global index ranges that each rank holds. A Partial axis gets
operands that differ on every rank and change sign, so that a reduction left out, doubled or done in the wrong order
shows.
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
from ..errors import PlacementError, WorldError
from ..sharding.layout import Coordinate, Layout, PartialAxes
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Placements
from ..sharding.spec import DTensorSpec, contiguous_meta
from ..tensor.dtensor import DTensor
from ..world import RankTensor

Key = tuple[int, ...]
"""A rank's indices on the Partial axes, outermost first."""


def make_dtensor(value: Tensor, mesh: DeviceMesh, placements: Placements, *, seed: int) -> DTensor:
    """The distributed tensor of this value with these placements, `Partial` of every op included.

    Integer values, of any dtype, stay exact: their operands are whole numbers (or, in a product, powers of two). All
    ranks pass the same value and seed. In a simulated world, where a submesh has several parallel instances, `value`
    may be a RankTensor that gives each instance its own.
    """
    mesh_info = adopt(mesh)
    return with_spec(
        value, DTensorSpec(mesh_info.mesh, placements, contiguous_meta(value.shape, value.dtype)), seed=seed
    )


def with_spec(value: Tensor, spec: DTensorSpec, *, seed: int) -> DTensor:
    """The same for a spec, whose layout no placement list need be able to say. Its mesh has been adopted."""
    mesh_info = spec.mesh_info
    if mesh_info.simulated:
        values = value.shards if isinstance(value, RankTensor) else (value,) * mesh_info.world_size
        tables: dict[int, dict[Key, Tensor]] = {}
        shards: list[Tensor] = []
        for rank, at in enumerate(_coordinates(mesh_info)):
            instance = _instance_of(mesh_info, rank)
            if instance not in tables:
                tables[instance] = _operand_table(values[rank], spec.layout, seed)
            shards.append(_shard(tables[instance], spec.layout, at))
        return DTensor(RankTensor(shards), spec)
    assert mesh_info.coordinate is not None, "an adopted mesh holds this rank"
    return DTensor(_shard(_operand_table(value, spec.layout, seed), spec.layout, mesh_info.coordinate), spec)


def assemble(dtensor: DTensor, *, instance: int | None = None) -> Tensor:
    """The whole value of a tensor in a simulated world, put together from its shards without communication.

    An AssertionError says what is wrong where a shard has another shape or dtype than its spec says, replicas differ,
    or an element is held by nobody. Of nested Partial axes the inner ones, to the right, reduce first. On a submesh all
    parallel instances must agree, unless one is chosen.
    """
    spec, local = dtensor._spec, dtensor._local_tensor
    if not isinstance(local, RankTensor):
        raise WorldError("assemble sees only this process's shard", "use it in a simulated world, else full_tensor()")
    by_instance = spec.mesh_info.instances.flatten(1).tolist()
    chosen = by_instance if instance is None else [by_instance[instance]]
    values = [_assemble_ranks(ranks, local.shards, spec) for ranks in chosen]
    for ranks, value in zip(chosen[1:], values[1:], strict=True):
        _check(same(value, values[0]), f"{spec!r}: ranks {ranks} hold another value than ranks {chosen[0]}")
    return values[0]


# ---- operands of a reduction ----------------------------------------------------------------------------------------


def operands(value: Tensor, count: int, op: str, generator: torch.Generator, unit: int = 1) -> list[Tensor]:
    """Tensors, as many as asked, that differ and change sign and whose reduction by `op` is `value`.

    Sums and averages add multiples of `unit`, so that integers stay integers; products multiply by powers of two, or
    by signs alone where the dtype has no fractions.
    """
    dtype = value.dtype
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise PlacementError(f"operands of an average of {dtype}", "use a floating-point dtype")
    if op in ("max", "min") and dtype.is_complex:
        raise PlacementError(f"operands of a {op} of {dtype}", "complex numbers have no order")
    if dtype is torch.bool:
        return _bool_operands(value, count, op, generator)
    wide = value.to(_wide(dtype))
    if op in ("max", "min"):
        return [part.to(dtype) for part in _extreme_operands(wide, dtype, count, op, generator)]
    if op == "product":
        factors = [_pick(wide, _FACTORS[_kind(dtype)], generator) for _ in range(count - 1)]
        rest = wide
        for factor in factors:  # whose inverse is exact
            rest = rest / factor if dtype.is_floating_point else rest * factor.conj()
        return [part.to(dtype) for part in (*factors, rest)]
    noise = [unit * _integers(wide, -4, 5, generator) for _ in range(count - 1)]
    if op == "avg":
        return [(wide + part).to(dtype) for part in (*noise, -sum(noise))]
    return [part.to(dtype) for part in (*noise, wide - sum(noise))]


_FACTORS: dict[str, list[complex]] = {
    "unsigned": [1],
    "signed": [1, -1],
    "float": [-2, -1, -0.5, 0.5, 1, 2],
    "complex": [1, -1, 1j, -1j],
}


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "signed" if dtype.is_signed else "unsigned"


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _integers(like: Tensor, low: int, high: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(low, high, like.shape, generator=generator).to(like)
    if like.is_complex():
        drawn = torch.complex(drawn.real, torch.randint(low, high, like.shape, generator=generator).to(drawn.real))
    return drawn


def _pick(like: Tensor, choices: Sequence[complex], generator: torch.Generator) -> Tensor:
    index = torch.randint(len(choices), like.shape, generator=generator).to(like.device)
    return torch.tensor(choices, dtype=like.dtype, device=like.device)[index]


def _extreme_operands(
    wide: Tensor, dtype: torch.dtype, count: int, op: str, generator: torch.Generator
) -> list[Tensor]:
    """One rank, another for each element, holds the extreme; the others stay behind it by up to 12."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    holder = torch.randint(count, wide.shape, generator=generator).to(wide.device)
    parts = []
    for index in range(count):
        behind = _integers(wide, 0, 13, generator)
        if not dtype.is_floating_point:  # the widest integers have nowhere to go
            behind = torch.where((wide > limits.max - 13) | (wide < limits.min + 13), 0, behind)
        part = (wide - behind if op == "max" else wide + behind).clamp(limits.min, limits.max)
        parts.append(torch.where((holder == index) | wide.isinf(), wide, part))  # nothing is behind an infinity
    return parts


def _bool_operands(value: Tensor, count: int, op: str, generator: torch.Generator) -> list[Tensor]:
    holder = torch.randint(count, value.shape, generator=generator).to(value.device)
    parts = []
    for index in range(count):
        coin = torch.randint(2, value.shape, generator=generator).to(value.device).bool()
        part = value & coin if op in ("sum", "max") else value | coin
        parts.append(torch.where(holder == index, value, part))
    return parts


def _operand_table(value: Tensor, layout: Layout, seed: int) -> dict[Key, Tensor]:
    """The whole-tensor operand of every index on the Partial axes. Outer axes, to the left, split first."""
    generator = torch.Generator().manual_seed(seed)
    # Averages may be taken before or after sums: both are exact if operands differ by multiples of what divides.
    unit = math.prod(layout.mesh_sizes[axis] for axis, op in layout.partial if op == "avg")
    table: dict[Key, Tensor] = {(): value.detach()}
    for axis, op in layout.partial:
        table = {
            (*key, index): part
            for key, whole in table.items()
            for index, part in enumerate(operands(whole, layout.mesh_sizes[axis], op, generator, unit))
        }
    return table


def _shard(table: dict[Key, Tensor], layout: Layout, at: Coordinate) -> Tensor:
    """What the rank at this coordinate holds, in memory of its own."""
    part = table[_key(layout.partial, at)]
    for dim, index in enumerate(_indices(layout, at)):
        part = _as_bytes(part).index_select(dim, index.to(part.device)).view(part.dtype)
    return part.clone(memory_format=torch.contiguous_format)


# ---- the whole from its shards -----------------------------------------------------------------------------------


def _assemble_ranks(ranks: Sequence[int], shards: Sequence[Tensor], spec: DTensorSpec) -> Tensor:
    layout, wholes, seen = spec.layout, dict[Key, Tensor](), dict[Key, Tensor]()
    coordinates = _coordinates(spec.mesh_info)
    for rank in ranks:
        at, shard = coordinates[rank], shards[rank]
        expected = spec.local_shape(at)
        _check(tuple(shard.shape) == expected, f"{spec!r}: rank {rank} has {list(shard.shape)}, not {list(expected)}")
        _check(shard.dtype == spec.dtype, f"{spec!r}: rank {rank} has {shard.dtype}, not {spec.dtype}")
        key = _key(layout.partial, at)
        if key not in wholes:
            wholes[key] = torch.zeros(spec.shape, dtype=spec.dtype, device=shard.device)
            seen[key] = torch.zeros(spec.shape, dtype=torch.bool, device=shard.device)
        if shard.numel() == 0:
            continue
        where = _grid(layout, at)
        held = _as_bytes(wholes[key])[where].view(spec.dtype)
        agrees = _equal(held, shard) | ~seen[key][where]
        _check(bool(agrees.all()), f"{spec!r}: rank {rank} differs from a rank that holds the same elements")
        _as_bytes(wholes[key])[where] = _as_bytes(shard)
        seen[key][where] = True
    for key, mask in seen.items():
        _check(bool(mask.all()), f"{spec!r}: nobody holds {(~mask).nonzero().tolist()[:4]} of operand {key}")
    return _reduced(wholes, layout.partial, spec.dtype)


def _reduced(table: dict[Key, Tensor], partial: PartialAxes, dtype: torch.dtype) -> Tensor:
    """The value of these operands: inner axes first, in a wide dtype, rounded once at the end."""
    if not partial:
        return table[()]
    wide = {key: part if dtype is torch.bool else part.to(_wide(dtype)) for key, part in table.items()}
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
    """Whether two tensors have the same shape, dtype and values, NaN being the same as NaN."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(_equal(one, other).all())


def _equal(one: Tensor, other: Tensor) -> Tensor:
    if one.dtype.is_floating_point and one.dtype.itemsize == 1:  # float8 cannot be compared
        one, other = one.float(), other.float()
    return (one == other) | ((one != one) & (other != other))


# ---- index arithmetic --------------------------------------------------------------------------------------------


def _coordinates(mesh_info: MeshInfo) -> list[Coordinate]:
    """The coordinate of every rank; all are in an adopted mesh."""
    return [at for at in mesh_info.coordinates if at is not None]


def _instance_of(mesh_info: MeshInfo, rank: int) -> int:
    return int((mesh_info.instances.flatten(1) == rank).any(1).nonzero().item())


def _key(partial: PartialAxes, at: Coordinate) -> Key:
    return tuple(at[axis] for axis, _ in partial)


def _indices(layout: Layout, at: Coordinate) -> list[Tensor]:
    """For each dim the global indices that the rank at this coordinate holds, in local order."""
    return [
        torch.tensor([*itertools.chain(*itertools.starmap(range, runs))], dtype=torch.int64) for runs in layout.runs(at)
    ]


@lru_cache(maxsize=4096)
def _grid(layout: Layout, at: Coordinate) -> tuple[Tensor, ...]:
    """The indices of all dims, ready to index the whole tensor with."""
    indices = _indices(layout, at)
    shape = [1] * len(indices)
    return tuple(index.view(*shape[:dim], -1, *shape[dim + 1 :]) for dim, index in enumerate(indices))


_INDEXED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _as_bytes(tensor: Tensor) -> Tensor:
    """Dtypes that torch cannot index, as ones that it can."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor.view(_INDEXED_AS.get(tensor.dtype, tensor.dtype))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
