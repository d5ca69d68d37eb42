"""Wrappers of local code: run rank by rank, skip empty shards, return a given memory order, draw random numbers.

In the simulated world local arguments are `RankTensor`s, and code that depends on the rank runs rank by rank
(`on_each`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm.transport import identity
from ..ops.call import Args, Kwargs
from ..ops.resolve import ResolvedOp
from ..ops.schema import tensor_arguments
from ..random import Draw
from ..sharding.layout import Coordinate, Layout
from ..sharding.memory_order import MemoryOrder, contiguous_stride, in_memory_order, meta_of
from ..sharding.mesh import MeshInfo
from ..sharding.recording import recorded
from ..sharding.spec import DTensorSpec
from ..world import RankTensor, map_ranks, values_of

Made = TypeVar("Made")


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in an argument or a result: the tensor itself, or those of a list or tuple."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [element for element in values if isinstance(element, Tensor)]


def ordered_as(specs: Sequence[DTensorSpec], run: Callable[..., object]) -> Callable[..., object]:
    """Wrap local code to return its results in the memory order of their specs."""
    orders = [spec.memory_order for spec in specs]

    def ordered(*args: object, **kwargs: object) -> object:
        remaining = iter(orders)

        def place(result: object) -> object:
            if isinstance(result, (list, tuple)):
                return type(result)(place(element) for element in result)
            return in_order(result, next(remaining)) if isinstance(result, Tensor) else result

        return place(run(*args, **kwargs))

    return ordered


def in_order(local: Tensor, order: MemoryOrder | None) -> Tensor:
    """Return a local tensor whose dims have this order in memory."""
    if isinstance(local, RankTensor):  # rank by rank: an empty shard has no memory order
        mapped: Tensor = map_ranks(lambda rank, shard: in_memory_order(shard, order), local)
        return mapped
    return in_memory_order(local, order)


def copied(local: Tensor, spec: DTensorSpec) -> Tensor:
    """Return a copy of a local shard, expanded where its spec is."""
    return local.clone() if spec.dense else in_order(local.clone(), spec.memory_order)


def fill(layout: Layout, dtype: torch.dtype) -> complex:
    """Return the result of a rank without data: the identity of the reduction, or an empty tensor."""
    ops = [op for _, op in layout.partial]
    if dtype.is_complex and ops[:1] in (["max"], ["min"]):
        return 0  # complex numbers have no least one; the op itself raises an error
    return identity(dtype, ops[0]) if ops else 0


def skipping_empty(
    op: ResolvedOp,
    mesh_info: MeshInfo,
    layouts: Sequence[Layout],
    fills: Sequence[complex],
    dtypes: Sequence[torch.dtype],
    structure: Any,
) -> Callable[..., object]:
    """Wrap an op so that ranks with an empty operand do not call it: many kernels raise there, some crash."""
    outs = [argument.name for argument in tensor_arguments(op.func) if argument.out]
    run = op.python or op.func

    def at_rank(at: Coordinate, args: Args, kwargs: Kwargs) -> object:
        read = (*args, *(value for name, value in kwargs.items() if name not in outs))
        tensors = [t for value in read for t in tensors_in(value)]
        if not any(tensor.numel() == 0 for tensor in tensors):
            return run(*args, **kwargs)
        if op.is_view:
            made = [_empty_view(tensors[0], layout.local_shape(at), dtypes[0]) for layout in layouts]
        else:
            made = [
                tensors[0].new_full(layout.local_shape(at), fill, dtype=dtype, device=kwargs.get("device"))
                for layout, fill, dtype in zip(layouts, fills, dtypes, strict=True)
            ]
        for name, result in zip(outs, made, strict=False):
            if kwargs[name].shape == result.shape:
                kwargs[name].copy_(result)
        if isinstance(structure, (tuple, list)):
            return type(structure)(None if index is None else made[index] for index in structure)
        return None if structure is None else made[structure]

    return on_each(mesh_info, lambda at, args, kwargs: (args, kwargs), lambda call, at: at_rank(at, *call))


def _empty_view(empty: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a view without elements, whose writes count as writes to its base, as on other ranks."""
    flat = empty.as_strided((0,), (1,))
    return (flat if flat.dtype == dtype else flat.view(dtype)).as_strided(shape, contiguous_stride(shape))


def drawing(run: Callable[..., object], mesh_info: MeshInfo, like: Tensor) -> Callable[..., object]:
    """Wrap local code to get a `Draw` instead of a generator: one for each call, shared by all ranks."""
    meta = meta_of(like)

    def draw(*args: object, generator: torch.Generator | None = None, **kwargs: object) -> object:
        device = next(tensor.device for value in (*args, *kwargs.values()) for tensor in tensors_in(value))
        return recorded(draw_and_run, device, generator, args, kwargs)

    def draw_and_run(
        device: torch.device, generator: torch.Generator | None, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        return run(*args, **kwargs, generator=Draw(mesh_info, meta, device, generator))

    return draw


def on_each(
    mesh_info: MeshInfo, make: Callable[..., Made], fn: Callable[[Made, Coordinate], object]
) -> Callable[..., object]:
    """Return a function of local arguments that returns `fn(make(at, args, kwargs), at)` for each rank's coordinate."""

    def run(*args: object, **kwargs: object) -> object:
        if not mesh_info.simulated:
            return fn(make(mesh_info.coordinate, args, kwargs), mesh_info.coordinate)
        coordinates = mesh_info.coordinates
        return map_ranks(
            lambda rank: fn(make(coordinates[rank], of_rank(args, rank), of_rank(kwargs, rank)), coordinates[rank]),
            ranks=len(coordinates),
        )

    return run


def of_rank(value: object, rank: int) -> Any:
    """Return the value that one simulated rank has of an argument: its shard, its size, and so on in containers."""
    if isinstance(value, RankTensor):
        return value.shards[rank]
    if isinstance(value, torch.SymInt):
        values = values_of(value)
        return value if values is None else values[rank]
    if isinstance(value, dict):
        return {name: of_rank(element, rank) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(of_rank(element, rank) for element in value)
    return value
