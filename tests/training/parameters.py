"""Parameters of every kind: cut, unevenly and to nothing, replicated, of several meshes, and plain ones among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import DTensor, Placement, Replicate, Shard, distribute_tensor

same, rows, columns = Replicate(), Shard(0), Shard(1)

Home = tuple[str, tuple[Placement, ...]] | None
"""Where a parameter lives: the name of a mesh and placements there, or None for a plain tensor."""

Kind = tuple[tuple[int, ...], Home]
"""The shape of a parameter and where it lives."""

ONE_MESH: list[Kind] = [
    ((8, 6), ("square", (rows, columns))),
    ((5, 3), ("square", (columns, rows))),  # uneven
    ((3,), ("square", (rows, rows))),  # one rank holds nothing
    ((4, 2), ("square", (same, rows))),
    ((2, 3), ("square", (same, same))),
]
EVERY_KIND: list[Kind] = [
    *ONE_MESH,
    ((6, 4), ("submesh", (rows,))),
    ((5,), ("submesh", (same,))),
    ((7, 2), ("line", (rows,))),
    ((), ("line", (same,))),
    ((3, 2), None),
    ((4,), None),
]


@contextmanager
def meshes() -> Iterator[dict[str, DeviceMesh]]:
    """Four ranks as a square, as one axis of it, and as a line."""
    with shardwise.simulate(4):
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
        yield {"square": square, "submesh": square["a"], "line": line}


def values(kinds: Sequence[Kind], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """A random value for each parameter, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, _ in kinds]


def at_home(value: Tensor, home: Home, on: dict[str, DeviceMesh]) -> Tensor:
    """The value where the parameter lives."""
    if home is None:
        return value.clone()
    return distribute_tensor(value.clone(), on[home[0]], home[1])


def leaves(kinds: Sequence[Kind], wholes: Sequence[Tensor], on: dict[str, DeviceMesh] | None) -> list[nn.Parameter]:
    """The parameters; all plain where there are no meshes."""
    if on is None:
        return [nn.Parameter(whole.clone()) for whole in wholes]
    return [nn.Parameter(at_home(whole, home, on)) for whole, (_, home) in zip(wholes, kinds, strict=True)]


def whole_of(value: Any) -> Any:
    """The value on one device."""
    return shardwise.world.common(value.detach().full_tensor()) if isinstance(value, DTensor) else value
