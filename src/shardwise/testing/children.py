"""Jobs in forked child processes, which may crash or hang.

>>> dict(in_children({"a": lambda: 1, "b": os.abort}, count=2, seconds=5))
{'a': 1, 'b': Lost(reason='crash')}

A fork has all ops that the caller has defined. It has no other threads, so it computes with one. Jobs that are ranks of
one process group meet through a file: the server of a `TCPStore` in the caller would have a thread, and a fork copies
the locks that this thread holds, so that the child might wait for them forever.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import selectors
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch

from .._torch.testing import FileStore

K = TypeVar("K")
R = TypeVar("R")


class Lost(NamedTuple):
    """The answer of a job without a result: `reason` is `crash`, `slow` (out of time), or the text of an error."""

    reason: str


class _Child(NamedTuple, Generic[K]):
    name: K
    pid: int
    deadline: float
    received: list[bytes]


def in_children(
    jobs: Mapping[K, Callable[[], R]], count: int = 2, seconds: float = 120.0
) -> Iterator[tuple[K, R | Lost]]:
    """Yield the result of each job when it is ready, or `Lost` if there is none. `count` jobs run at a time."""
    waiting = list(jobs.items())[::-1]
    selector = selectors.DefaultSelector()
    running: dict[int, _Child[K]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < count:
                name, work = waiting.pop()
                pid, pipe = _fork(work)
                running[pipe] = _Child(name, pid, time.monotonic() + seconds, [])
                selector.register(pipe, selectors.EVENT_READ)
            timeout = max(0.0, min(child.deadline for child in running.values()) - time.monotonic())
            ready = {key.fd for key, _ in selector.select(timeout)}
            for pipe, child in list(running.items()):
                data = os.read(pipe, 1 << 20) if pipe in ready else b""
                child.received.append(data)
                late = time.monotonic() > child.deadline
                if late or (pipe in ready and not data):
                    selector.unregister(pipe)
                    del running[pipe]
                    yield child.name, _ended(child, pipe, late)
    finally:
        for pipe, child in running.items():
            _ended(child, pipe, late=True)
        selector.close()


@contextmanager
def meeting_file() -> Iterator[str]:
    """Yield the path of a new file for the `FileStore` of jobs that are ranks of one process group."""
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "store")


def store_at(path: str, timeout: timedelta) -> FileStore:
    """Return the store in a file, with this timeout."""
    store = FileStore(path)
    store.set_timeout(timeout)
    return store


def _fork(work: Callable[[], object]) -> tuple[int, int]:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads
        pid = os.fork()
    if pid == 0:
        os.close(read)
        _answer(work, write)
    os.close(write)
    return pid, read


def _answer(work: Callable[[], object], write: int) -> NoReturn:
    """Run the job in the child and send its result. Never returns to the caller's code."""
    try:
        faulthandler.disable()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)  # crashing kernels print to these
        torch.set_num_threads(1)
        try:
            answer: object = work()
        except Exception as error:
            answer = Lost(f"{type(error).__name__}: {error}")
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
    finally:
        os._exit(0)


def _ended(child: _Child[K], pipe: int, late: bool) -> Any:
    if late:
        os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(pipe)
    if late:
        return Lost("slow")
    try:
        return pickle.loads(b"".join(child.received))
    except (EOFError, pickle.UnpicklingError):
        return Lost("crash")
