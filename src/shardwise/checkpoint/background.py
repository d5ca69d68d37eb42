"""Saves in the background: the worker thread, the staging buffer, and errors."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import CheckpointError


class Saving:
    """A save in the background. `wait()` returns its path when the checkpoint is complete, or raises its error.

    >>> saving = async_save({"step": 100}, folder / "step-100")
    >>> saving.wait().name, saving.done()
    ('step-100', True)
    """

    def __init__(self, path: Path, work: Callable[[Callable[[], None]], None], staged: bool = False) -> None:
        """`work` is called in the worker thread, with a function to call as soon as the state has been copied.

        `staged` says that the state is copied already.
        """
        self.path = path
        self._error: BaseException | None = None
        self._work: Callable[[Callable[[], None]], None] | None = work
        self._staged = threading.Event()
        if staged:
            self._staged.set()
        self._done = threading.Event()
        worker().submit(self._run)

    def staged(self) -> None:
        """Wait until the state has been copied and may be changed. Only `staging="deferred"` needs this call."""
        self._staged.wait()

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self._done.is_set()

    def wait(self) -> Path:
        """Wait for the end of the save, and raise its error if it failed."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"saving {self.path} in the background failed: {error}") from error
        return self.path

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work(self._staged.set)
        except BaseException as error:
            self._error = error
        finally:
            self._work = None  # frees what it refers to
            self._staged.set()
            self._done.set()

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done() else 'under way'})"


class _Background:
    saving: Saving | None = None
    worker: ThreadPoolExecutor | None = None
    buffer: Tensor = torch.empty(0, dtype=torch.uint8)
    optimizers_wait = False


def worker() -> ThreadPoolExecutor:
    """Return the thread that runs all saves in the background.

    It is reused: Python hands the interpreter's lock to a new thread, and the program would wait for milliseconds. When
    the program ends, Python waits for the thread's work.
    """
    if _Background.worker is None:
        _Background.worker = ThreadPoolExecutor(1, thread_name_prefix="shardwise-checkpoint")
    return _Background.worker


def _forget_after_fork() -> None:
    """Drop worker and save in a forked process, which does not run the thread."""
    _Background.worker = _Background.saving = None


os.register_at_fork(after_in_child=_forget_after_fork)


def start_background(path: Path, work: Callable[[Callable[[], None]], None], staged: bool = False) -> Saving:
    """Start a save in the background. There may be only one at a time."""
    assert _Background.saving is None or _Background.saving.done(), "the previous save was waited for"
    _Background.saving = Saving(path, work, staged)
    return _Background.saving


def finish_background() -> None:
    """Wait for the save in the background, if there is one, and raise its error unless it was raised before."""
    saving, _Background.saving = _Background.saving, None
    if saving is not None:
        saving.wait()


def let_optimizers_wait() -> None:
    """Make every optimizer `step` wait until the state of a deferred save has been copied."""
    if not _Background.optimizers_wait:
        register_optimizer_step_pre_hook(_wait_until_staged)
        _Background.optimizers_wait = True


def _wait_until_staged(*arguments: object) -> None:
    saving = _Background.saving
    if saving is not None:
        saving.staged()


@atexit.register
def _report() -> None:
    """Print an error that no call has raised, at the end of the process."""
    saving = _Background.saving
    if saving is not None and saving.done() and saving._error is not None:
        print(f"saving {saving.path} in the background failed: {saving._error}", file=sys.stderr)


def staging_buffer(nbytes: int, pinned: bool = False) -> Tensor:
    """Return the staging buffer of this process, of at least `nbytes` bytes. It is reused by the next save."""
    if _Background.buffer.nbytes < nbytes or (pinned and not _Background.buffer.is_pinned()):
        _Background.buffer = torch.empty(0, dtype=torch.uint8)  # free the old one before the new one is allocated
        _Background.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    return _Background.buffer


def release_staging_buffer() -> None:
    """Free the staging buffer; the next save in the background allocates it again.

    >>> path = async_save({"model": model}, folder / "step-100").wait()
    >>> release_staging_buffer()
    """
    finish_background()
    _Background.buffer = torch.empty(0, dtype=torch.uint8)
