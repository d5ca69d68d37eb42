"""A small decoder's state dict on a trainer's mesh, and how a generator wants it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Replicate, Shard, distribute_tensor

HEADS, KV_HEADS, WIDTH, HIDDEN, WORDS = 8, 4, 16, 28, 30


def weights(layers: int = 2) -> dict[str, Tensor]:
    """Plain weights, the same on all ranks."""
    numbers = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (WORDS, WIDTH), "norm.weight": (WIDTH,)}
    for layer in range(layers):
        name = f"layers.{layer}"
        shapes[f"{name}.q.weight"] = (2 * HEADS, WIDTH)
        shapes[f"{name}.k.weight"] = (2 * KV_HEADS, WIDTH)
        shapes[f"{name}.v.weight"] = (2 * KV_HEADS, WIDTH)
        shapes[f"{name}.o.weight"] = (WIDTH, 2 * HEADS)
        shapes[f"{name}.up.weight"] = (HIDDEN, WIDTH)
        shapes[f"{name}.down.weight"] = (WIDTH, HIDDEN)
    return {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}


def fully_sharded(plain: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Any]:
    """The weights as a trainer has them: all sharded along dim 0."""
    return {name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for name, value in plain.items()}


def tensor_parallel(name: str, shape: torch.Size) -> list[Any]:
    """The placements of a generator on a mesh of dp and tp."""
    if len(shape) == 1:
        return [Replicate(), Replicate()]
    return [Replicate(), Shard(1 if name.endswith(("o.weight", "down.weight")) else 0)]


def full(tensor: DTensor) -> Tensor:
    """The global value, on one of the simulated ranks."""
    return tensor.full_tensor().shards[0]  # type: ignore[attr-defined]
