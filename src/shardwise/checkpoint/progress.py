"""A progress bar on a terminal: bytes, percentage, rate."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts bytes, and shows them on stderr if `show` is true, or None and stderr is a terminal."""

    def __init__(self, label: str, total: int, show: bool | None) -> None:
        self.label, self.total, self.done = label, max(total, 1), 0
        self._shown = sys.stderr.isatty() if show is None else show
        self._begin = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        self.done += count
        if self._shown and time.monotonic() - self._last > 0.1:
            self._print()

    def finish(self) -> None:
        """Show the final state, and end the line."""
        if self._shown:
            self._print()
            print(file=sys.stderr)

    def _print(self) -> None:
        self._last = time.monotonic()
        share = min(1.0, self.done / self.total)
        rate = self.done / max(self._last - self._begin, 1e-9) / 1e9
        bar = "#" * round(30 * share)
        print(
            f"\r{self.label} [{bar:<30}] {share:4.0%} of {self.total / 1e9:.2f} GB, {rate:.2f} GB/s",
            end="",
            file=sys.stderr,
            flush=True,
        )
