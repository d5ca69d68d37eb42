"""A small network, plain or with distributed parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import Placement, Replicate, Shard, distribute_tensor

same, rows, columns = Replicate(), Shard(0), Shard(1)

Placing = Callable[[str], list[Placement]]


def data_parallel(name: str) -> list[Placement]:
    return [same, same]


def zero(name: str) -> list[Placement]:
    return [rows, rows]


def tensor_parallel(name: str) -> list[Placement]:
    return [same, {"0.weight": rows, "0.bias": rows, "3.weight": columns}.get(name, same)]


PLACINGS: dict[str, Placing] = {
    "data parallel": data_parallel,
    "every parameter cut": zero,
    "tensor parallel": tensor_parallel,
}


def network(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two layers and a norm; the same each time."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Dropout(dropout), nn.Linear(10, 5), nn.LayerNorm(5))
    return layers.to(dtype)


def placed(module: nn.Module, mesh: DeviceMesh, placing: Placing) -> nn.Module:
    """A copy whose parameters have these placements, and whose buffers are replicated."""
    module = copy.deepcopy(module)
    for name, parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        cut = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placing(name)))
        setattr(module.get_submodule(owner), last, cut)
    for name, buffer in list(module.named_buffers()):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, distribute_tensor(buffer, mesh, [same] * mesh.ndim))
    return module


def batch(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Seven rows: the last of them are not on all ranks."""
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cut_batch(seed: int, mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> Any:
    """The same, sharded over the first axis."""
    return distribute_tensor(batch(seed, dtype), mesh, [rows, same])


def loss_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """The mean of squares."""
    return module(inputs).square().mean()
