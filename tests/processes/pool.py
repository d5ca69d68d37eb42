"""Run a test on real processes: four gloo ranks that start once and serve all the tests of a session.

    @on_processes
    def test_something(tmp_path):      # runs on every rank; fixtures and parameters are sent along
        mesh = init_device_mesh("cpu", (4,))

A rank that raises, dies or hangs fails the test with the traceback of every rank, within `PATIENCE` seconds; the
next test gets fresh processes. They are forked from one server process that has imported PyTorch already, so that
starting them is cheap. Under pytest-xdist each worker has its own four; they do not meet.
"""

import atexit
import faulthandler
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANKS = 4
PATIENCE = 60.0  # seconds for one test
GRACE = 5.0  # seconds that the others get once a rank has failed
MANY_THREADS = 150  # above which processes are started anew: the groups of earlier tests take time from later ones

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "pytest"])


def on_processes(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test that runs `body` on every rank."""

    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        __tracebackhide__ = True
        failures = _pool().run(body.__module__, body.__qualname__, arguments)
        if failures:
            pytest.fail(failures, pytrace=False)

    return test


# ---- this side -------------------------------------------------------------------------------------------------------


class Pool:
    """The processes, and a pipe to each."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.stacks = [Path(tempfile.mkstemp(prefix=f"rank{rank}-", suffix=".stack")[1]) for rank in range(RANKS)]
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = _context.Pipe()
            arguments = (rank, self.store.port, there, str(self.stacks[rank]), list(sys.path))
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, module: str, name: str, arguments: dict[str, Any], patience: float = PATIENCE) -> str:
        """Run one function on all ranks; what went wrong, or an empty text."""
        for pipe in self.pipes:
            with suppress(OSError):  # a dead rank is found below
                pipe.send((module, name, arguments))
        answers = self._answers(patience)
        if not any(answers.values()):
            return ""
        self.close()
        told: dict[str, list[int]] = {}
        for rank in range(RANKS):
            told.setdefault(answers[rank] or "passed", []).append(rank)
        return "\n".join(f"---- rank {', '.join(map(str, ranks))}\n{text}" for text, ranks in told.items())

    def _answers(self, patience: float) -> dict[int, str]:
        answers: dict[int, str] = {}
        deadline = time.monotonic() + patience
        while len(answers) < RANKS:
            waiting = {self.pipes[rank]: rank for rank in range(RANKS) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers | self._dump(list(waiting.values()))
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self.processes[rank].join(1.0)
                    answers[rank] = f"died with exit code {self.processes[rank].exitcode}"
                if answers[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _dump(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of ranks that do not answer."""
        for rank in ranks:
            with suppress(OSError, TypeError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return {rank: f"no answer; its stack:\n{self.stacks[rank].read_text()}" for rank in ranks}

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        for stack in self.stacks:
            stack.unlink(missing_ok=True)
        self.processes, self.pipes, self.stacks = [], [], []


_running: list[Pool] = []


def _pool() -> Pool:
    if _running and _running[0].processes and _threads(_running[0].processes[0].pid) > MANY_THREADS:
        _running[0].close()
    if not _running or not _running[0].processes:
        _running[:] = [Pool()]
    return _running[0]


def _threads(pid: int | None) -> int:
    """How many threads a process has: each gloo group has some, which wake up again and again as long as it lives."""
    tasks = Path(f"/proc/{pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


@atexit.register
def restart() -> None:
    """End the processes; the next test starts fresh ones."""
    for pool in _running:
        pool.close()


# ---- the ranks' side -------------------------------------------------------------------------------------------------


def _serve(rank: int, port: int, pipe: Any, stack: str, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        store = dist.TCPStore("localhost", port, is_master=False)
        limit = timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
        with suppress(EOFError):
            while True:
                pipe.send(_run(*pipe.recv()))


def _run(module: str, name: str, arguments: dict[str, Any]) -> str:
    random.seed(0)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            body: Any = importlib.import_module(module)
            for part in name.split("."):
                body = getattr(body, part)
            getattr(body, "__wrapped__", body)(**arguments)
    except BaseException:
        return traceback.format_exc()
    return ""
