"""The ranks on which a mesh is tested: processes of torchrun, or processes forked here."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...sharding.mesh import init_device_mesh
from ...testing.children import Lost, in_children, meeting_file, store_at
from ..mesh import Mesh
from .machine import backends
from .measure import Measured, measure
from .self_test import Check, self_test


class Findings(NamedTuple):
    """The checks of a mesh and its measured costs; None if a check failed."""

    checks: list[Check]
    measured: Measured | None


def launched() -> bool:
    """Return whether this process is a rank that torchrun, or the like, has started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def default_mesh() -> Mesh:
    """Return a mesh over the ranks of torchrun, else over the GPUs of this machine, else over four processes."""
    if launched():
        return {"ranks": int(os.environ["WORLD_SIZE"])}
    gpus = torch.cuda.device_count()
    return {"ranks": gpus} if gpus > 1 else {"dp": 2, "tp": 2}


def device_for(ranks: int) -> str:
    """Return the device type of a test with this many ranks on this machine: NCCL needs a GPU for each."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return "cuda" if backends().get("nccl") and torch.cuda.device_count() >= here else "cpu"


def try_here(mesh: Mesh, device: str, nbytes: int) -> Findings:
    """Test the mesh as one of the ranks of torchrun."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(_backend(device))
    try:
        return _try(mesh, device, nbytes)
    finally:
        dist.destroy_process_group()


def try_on_processes(mesh: Mesh, device: str, nbytes: int, seconds: float) -> Findings:
    """Test the mesh on processes of this machine."""
    count = math.prod(mesh.values())
    with meeting_file() as path:
        jobs = {rank: partial(_rank, rank, path, mesh, device, nbytes, seconds) for rank in range(count)}
        answers = dict(in_children(jobs, count, seconds))
    lost = {rank: answer.reason for rank, answer in sorted(answers.items()) if isinstance(answer, Lost)}
    if lost:
        what = {"slow": f"no answer within {seconds:.0f} s", "crash": "the process died"}
        problems = "; ".join(f"rank {rank}: {what.get(reason, reason)}" for rank, reason in lost.items())
        return Findings([Check(f"{count} processes", problems)], None)
    first = answers[0]
    assert isinstance(first, Findings)
    return first


def _rank(rank: int, path: str, mesh: Mesh, device: str, nbytes: int, seconds: float) -> Findings:
    if device == "cuda":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=seconds)
    store = store_at(path, limit)
    count = math.prod(mesh.values())
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=count, timeout=limit)
    return _try(mesh, device, nbytes)


def _try(mesh: Mesh, device: str, nbytes: int) -> Findings:
    device_mesh = init_device_mesh(device, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    checks = self_test(device_mesh)
    works = not any(check.problem for check in checks)
    return Findings(checks, measure(device_mesh, nbytes) if works else None)


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"
