"""Ranks that PyTorch's tests run as threads of one process, as forked processes: a process is one rank of one world."""

import os
import tempfile
import traceback
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch.distributed
import torch.multiprocessing
from torch.testing._internal.common_distributed import MultiThreadedTestCase

SECONDS_PER_TEST = 300
Rank = tuple[ForkProcess, Connection]
_running: dict[tuple[type, int], list[Rank]] = {}


def replace_threads() -> None:
    """Let test cases of rank threads start and join processes. A class keeps its processes until a test fails."""
    MultiThreadedTestCase._spawn_threads = _start
    MultiThreadedTestCase._join_threads = classmethod(_join)


def _start(case: MultiThreadedTestCase) -> None:
    key = type(case), case.world_size
    for other in [other for other in _running if other != key]:
        _stop(_running.pop(other))
    if key not in _running:
        context = torch.multiprocessing.get_context("fork")
        _running[key] = []
        for rank in range(case.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(type(case), rank, theirs), daemon=True)
            process.start()
            theirs.close()
            _running[key].append((process, ours))
    case.threads = _running[key]
    store = Path(tempfile.mkdtemp()) / "store"
    for _, pipe in case.threads:
        pipe.send((case._testMethodName, f"file://{store}"))


def _serve(kind: type[MultiThreadedTestCase], rank: int, pipe: Connection) -> None:
    """Run tests as one rank, and send the error of each, or None."""
    while True:
        try:
            name, store = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_error_of(kind(name), rank, store))


def _error_of(case: MultiThreadedTestCase, rank: int, store: str) -> BaseException | None:
    case.rank = rank
    try:
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=case.world_size)
        case.perThreadSetUp()
        getattr(case, case._testMethodName)()
        torch.distributed.destroy_process_group()
    except (unittest.SkipTest, SystemExit) as skip:
        return skip
    except BaseException:
        return RuntimeError(traceback.format_exc())
    return None


def _join(kind: type[MultiThreadedTestCase], ranks: list[Rank], test: Callable[[], None]) -> None:
    """Wait for all ranks, and raise their errors. Once one has failed, the others may wait for it without end."""
    failed = []
    for rank, (_, pipe) in enumerate(ranks):
        came = pipe.poll(1 if failed else SECONDS_PER_TEST)
        error = pipe.recv() if came else None if failed else TimeoutError("no answer")
        if error is not None:
            failed.append((rank, (type(error), error, None)))
    if failed:
        _stop(_running.pop((kind, len(ranks))))
    kind._check_return_codes(failed, SECONDS_PER_TEST, test)


def _stop(ranks: list[Rank]) -> None:
    for process, _ in ranks:
        process.kill()
        process.join()
