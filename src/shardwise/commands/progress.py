"""A line on the terminal that says what a command is doing, for work of more than a second.

>>> with Progress() as progress:
...     progress("measuring dp")
...     measure("dp")

Nothing is written in the first second, nor if standard error is not a terminal. The line is erased at the end.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

_PATIENCE = 1.0
_INTERVAL = 0.1
_MARKS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Progress:
    """Shows the last label it was called with, and the seconds since the start of the block."""

    def __init__(self, label: str = "", stream: TextIO | None = None, patience: float = _PATIENCE) -> None:
        self._label, self._patience = label, patience
        self._stream = sys.stderr if stream is None else stream
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, label: str) -> None:
        """Show this label from now on."""
        self._label = label

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self._stream.isatty():
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        if self._done.wait(self._patience):
            return
        count = 0
        while True:
            seconds = time.monotonic() - self._start
            width = shutil.get_terminal_size().columns - 1
            line = f"{_MARKS[count % len(_MARKS)]} {self._label}  {seconds:.0f} s"[:width]
            self._stream.write(f"\r\033[K{line}")
            self._stream.flush()
            if self._done.wait(_INTERVAL):
                break
            count += 1
        self._stream.write("\r\033[K")
        self._stream.flush()
