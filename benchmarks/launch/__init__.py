"""Run part of a benchmark on processes of this machine.

>>> on_processes(run, 2, "an argument")     # run("an argument") on two ranks; what it returns on the first
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")


def on_processes(run: Callable[..., T], ranks: int, *arguments: object, backend: str = "gloo") -> T:
    """Call `run(*arguments)` on every rank of a new world, with one thread each, and return the result of rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result")
        given = (run, ranks, store.port, backend, out, arguments)
        mp.start_processes(_process, given, nprocs=ranks, start_method="spawn")
        found: T = torch.load(out, weights_only=False)
        return found


def _process(
    rank: int,
    run: Callable[..., object],
    ranks: int,
    port: int,
    backend: str,
    out: Path,
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    found = run(*arguments)
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()
