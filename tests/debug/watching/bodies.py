"""What the ranks of `ranks.py` run."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from shardwise import init_device_mesh
from shardwise.debug import unwatched, watch
from tests.debug.watching.divergences import CASES, Env


def agree(rank: int) -> None:
    """Nothing goes wrong. Imports what the first op imports, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    env = Env(mesh, rank, rank == 1)
    with watch(every=0.05):
        for _ in range(20):
            x = env.shard().requires_grad_()
            (x @ x.t()).relu().sum().backward()
            replica = env.replica()
            if env.odd:  # what one rank may do alone
                str(x), x.shape, x.to_local().sum(), x.grad.to_local(), replica[0, 0].item(), replica.full_tensor()
                with unwatched():
                    replica * 2
            dist.all_reduce(torch.ones(3))


def diverge(rank: int, name: str) -> None:
    """One of the cases of `divergences.py`."""
    case, odd, ndim = CASES[name]
    mesh = init_device_mesh("cpu", (4,) if ndim == 1 else (2, 2), mesh_dim_names=("dp", "tp")[:ndim])
    torch.manual_seed(0)
    env = Env(mesh, rank, rank == odd)
    env.shard().sum().full_tensor()  # the first tensor makes the groups
    with watch(every=0.05):
        case(env)


def die(rank: int, victim: int, where: str) -> None:
    """One rank is killed; the others sleep, or wait for it in a collective."""
    with watch(every=0.05):
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "asleep":
            time.sleep(60)
        dist.all_reduce(torch.ones(3))
