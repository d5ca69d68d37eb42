"""Four processes that run cases in which one of them differs, one case after the other.

A case ends with process groups whose connections are gone, so each has groups of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import sys
import time
import traceback
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

RANKS = 4
LIMIT = 60.0
"""Seconds after which a case counts as hanging."""

_BODIES = "tests.debug.watching.bodies"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "pytest"])


class Outcome(NamedTuple):
    """How a case ended on one rank: the type and text of its error, and after how many seconds."""

    error: str
    text: str
    seconds: float


class Ranks:
    """The processes, and a pipe to each. The store is in this process, like a launcher's, or in that of rank 0."""

    def __init__(self, *, store_in_rank_0: bool = False) -> None:
        self.store = None if store_in_rank_0 else _store_server()
        self.processes, self.pipes = [], []
        for rank in range(RANKS):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, there, list(sys.path)), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        for pipe in self.pipes:
            assert pipe.poll(4 * LIMIT), "a process does not start"
            pipe.recv()
        port = self.store.port if self.store is not None else None
        for pipe in self.pipes:  # rank 0 makes a store if it gets no port, and returns that of its store
            pipe.send(port)
            port = pipe.recv()

    def run(self, *case: Any) -> list[Outcome | None]:
        """Run a case on all ranks; None for a rank that died or hung."""
        for pipe in self.pipes:
            pipe.send(case)
        found: list[Outcome | None] = [None] * RANKS
        waiting, deadline = {pipe: rank for rank, pipe in enumerate(self.pipes)}, time.monotonic() + LIMIT
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = Outcome(*pipe.recv())
                except (EOFError, OSError):
                    self.processes[rank].join(5.0)
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _store_server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _serve(rank: int, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    importlib.import_module(_BODIES)
    pipe.send("ready")
    port = pipe.recv()
    store = _store_server() if port is None else dist.TCPStore("127.0.0.1", port, is_master=False)
    pipe.send(store.port)
    count = 0
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        count += 1
        pipe.send(_run(rank, dist.PrefixStore(f"case {count}", store), *case))


def _run(rank: int, store: dist.Store, name: str, *arguments: Any) -> tuple[str, str, float]:
    limit = timedelta(seconds=2 * LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    torch.set_grad_enabled(True)  # an error that interrupts a thread may have interrupted the end of a `no_grad` block
    start = time.monotonic()
    try:
        getattr(importlib.import_module(_BODIES), name)(rank, *arguments)
        return "", "", time.monotonic() - start
    except BaseException as error:
        return type(error).__name__, "".join(traceback.format_exception_only(error)), time.monotonic() - start
    finally:
        with contextlib.suppress(dist.DistError):  # the store may be gone
            dist.destroy_process_group()
