"""A snapshot of this process's memory: a forked child that shares all pages until they are written.

The operating system copies a page when the program first writes it after the fork. So a snapshot needs memory only for
the pages that are written while the child lives; but each of these writes is a page fault, and together they take
several times as long as a copy of the same memory.

The child does what a worker of a DataLoader does: tensor code on one thread, and files. It closes the sockets that it
inherits, so that other ranks notice when its parent dies, and exits when its parent dies.
"""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError, ShardwiseError

T = TypeVar("T")


def check_snapshot(tensors: Iterable[Tensor]) -> None:
    """Raise an error if a forked process would not see these tensors with their present values.

    The process may use a GPU, since the child never calls it: workers of a DataLoader are forked, too.
    """
    if not hasattr(os, "fork"):
        raise CheckpointError('staging="snapshot" needs a system that can fork', 'pass staging="buffer"')
    cuda = torch.cuda.is_initialized()
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.is_shared() or (cuda and tensor.is_pinned()):
            raise CheckpointError(
                'staging="snapshot" got tensors on a GPU, in shared or pinned memory, which a fork does not copy',
                'pass staging="buffer"',
            )


class Snapshot(Generic[T]):
    """Runs `work` in a forked child. `result()` waits for it, and returns its result or raises its error."""

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self._reading, writing = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork of a process with threads
            self._child = os.fork()
        if self._child == 0:
            _live(work, writing, parent)
        os.close(writing)

    def result(self) -> T:
        """Wait for the child, and return the result of `work` or raise its error."""
        with os.fdopen(self._reading, "rb") as file:
            data = file.read()
        with suppress(ChildProcessError):  # the program may have waited for all its children
            os.waitpid(self._child, 0)
        if not data:
            raise CheckpointError("the process that writes the snapshot died", "find the reason in the system's log")
        found = pickle.loads(data)  # safe: written by our own child
        if isinstance(found, ShardwiseError):
            raise found
        return found


def _live(work: Callable[[Callable[[], None]], T], writing: int, parent: int) -> None:
    """Run `work` in the child, send its result, and exit. Does not return."""

    def check() -> None:
        if os.getppid() != parent:
            os._exit(1)

    try:
        _close_all_but(writing)
        torch.set_num_threads(1)  # the other threads of OpenMP's pool are not in the child
        try:
            found: object = work(check)
        except ShardwiseError as error:
            found = CheckpointError(error.problem, error.fix)
        except OSError as error:
            found = CheckpointError(str(error))
        except BaseException:
            found = CheckpointError(traceback.format_exc())
        data = memoryview(pickle.dumps(found))
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 1024)):
        if int(name) > 2 and int(name) != kept:
            with suppress(OSError):
                os.close(int(name))
