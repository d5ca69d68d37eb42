"""One save in the background: its thread, its staging memory, and its errors."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError


class Saving:
    """A save in the background. `wait()` returns its path when the checkpoint is complete, or raises its error."""

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = work
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}")
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the end, and raise the error if there was one."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"saving {self.path} in the background failed: {error}") from error
        return self.path

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None  # with what it refers to

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done() else 'under way'})"


class _Background:
    saving: Saving | None = None
    buffer: Tensor = torch.empty(0, dtype=torch.uint8)


def start_background(path: Path, work: Callable[[], None]) -> Saving:
    """Start the only save in the background."""
    assert _Background.saving is None or _Background.saving.done(), "the one before was waited for"
    _Background.saving = Saving(path, work)
    return _Background.saving


def finish_background() -> None:
    """Wait for the save in the background, if there is one, and raise its error unless somebody has seen it."""
    saving, _Background.saving = _Background.saving, None
    if saving is not None:
        saving.wait()


@atexit.register
def _report() -> None:
    """Tell of an error that nobody has asked for, at the end of the process."""
    saving = _Background.saving
    if saving is not None and saving.done() and saving._error is not None:
        print(f"saving {saving.path} in the background failed: {saving._error}", file=sys.stderr)


def staging_buffer(nbytes: int) -> Tensor:
    """The staging memory, one for the process, pinned if there is an accelerator: no save in the background uses it."""
    if _Background.buffer.nbytes < nbytes:
        _Background.buffer = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is made
        _Background.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return _Background.buffer


def release_staging_buffer() -> None:
    """Free the staging memory; the next save in the background makes it again."""
    finish_background()
    _Background.buffer = torch.empty(0, dtype=torch.uint8)
