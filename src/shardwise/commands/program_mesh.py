"""The world that a function of the user's program runs in: ranks of torchrun, simulated ranks, or its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..sharding.mesh import DeviceMesh, init_device_mesh
from .mesh import parse_mesh, simulated_mesh


@contextmanager
def program_mesh(mesh: str | None) -> Iterator[DeviceMesh | None]:
    """Yield the mesh of --mesh: over the ranks of torchrun, or else over simulated ones. Yield None without --mesh."""
    if mesh is None:
        yield None
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        sizes = parse_mesh(mesh)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            yield init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    else:
        with simulated_mesh(mesh) as simulated:
            yield simulated
