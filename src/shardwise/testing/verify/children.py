"""Verifying entries in child processes, which may crash or hang."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict

import torch

from ..calls import Failure
from ..probe import Suggestion
from .entry import Effort, Report, Tried, probe_entry, verify


def work(effort: Effort, seed: int) -> None:
    """Serve as a child process: read entry names, write a line of JSON for each report and one for its hints."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # ops may print: that is not a report
    torch.set_num_threads(1)
    tried = Tried()
    for line in sys.stdin:
        name = line.strip()
        try:
            report = verify(name, effort, seed, tried)
        except Exception as error:
            report = Report(name, failures=[Failure.of(error, name)._replace(kind="error")])
        out.write(json.dumps(asdict(report)) + "\n")
        hints: list[Suggestion] = []
        if effort.probing:
            out.flush()
            with suppress(Exception):
                hints = probe_entry(name, effort, seed)
        out.write(json.dumps(hints) + "\n")


class Child:
    """A child process that verifies one entry after another, and is started again when it dies."""

    def __init__(self, effort: Effort, seed: int) -> None:
        self.effort, self.seed = effort, seed
        self.process: subprocess.Popen[bytes] | None = None
        self.received = b""

    def ask(self, name: str) -> Report:
        """Return the report of an entry; a crash or a hang is a failure of it."""
        if self.process is None:
            settings = json.dumps([*self.effort, self.seed])
            command = [sys.executable, "-m", "shardwise.testing.verify", "--child", settings]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdin is not None, "it was opened with a pipe"
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        line = self.line(self.effort.seconds * 4 + 60)
        if not line:
            kind = "slow" if self.process.poll() is None else "crash"
            self.close()
            return Report(name, failures=[Failure(kind, name, "", "the process did not answer")])
        values = json.loads(line)
        failures = [Failure(*failure) for failure in values.pop("failures")]
        report = Report(**{**values, "failures": failures})
        hints = self.line(60)
        if not hints:
            self.close()  # it crashed on a piece of an input, which is not a failure
        report.suggestions = [Suggestion(*hint) for hint in json.loads(hints or "[]")]
        return report

    def line(self, seconds: float) -> str:
        """Return the next line of the child; an empty text if it died or takes too long."""
        assert self.process is not None, "it was started by ask"
        assert self.process.stdout is not None, "it was opened with a pipe"
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not more:
                return ""
            self.received += more
        line, _, self.received = self.received.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            with suppress(BrokenPipeError), self.process:  # waits, and closes the pipes
                pass
            self.process, self.received = None, b""


def verify_all(chosen: Sequence[str], effort: Effort, seed: int, children: int = 2) -> Iterator[Report]:
    """Verify entries in child processes, several at a time; yields reports as they are ready."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
    for name in chosen:
        waiting.put(name)

    def serve() -> None:
        child = Child(effort, seed)
        try:
            while True:
                ready.put(child.ask(waiting.get_nowait()))
        except queue.Empty:
            pass
        finally:
            child.close()
            ready.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(children)]
    for thread in threads:
        thread.start()
    left = children
    while left:
        report = ready.get()
        if report is None:
            left -= 1
        else:
            yield report
