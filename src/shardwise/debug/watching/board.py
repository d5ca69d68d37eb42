"""The board, on which ranks publish values: the store of the default process group, over a separate connection.

Reading never waits for a key that does not exist, so a rank that never writes does not block others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from ..._torch.watching import own_store


class StoreGoneError(Exception):
    """The server of the store does not answer: the process that runs it has ended."""


class Board:
    """Values that ranks publish in the store, as JSON under short names."""

    def __init__(self, epoch: int) -> None:
        store: Any = PrefixStore(f"shardwise/watch/{epoch}", own_store())
        self._store = store
        self._seen: set[str] = set()
        self._many = self._store.has_extended_api()

    def write(self, name: str, value: object) -> None:
        """Write a value for all ranks."""
        try:
            self._store.set(name, json.dumps(value))
        except (RuntimeError, OSError) as error:
            raise StoreGoneError from error

    def write_first(self, name: str, value: object) -> None:
        """Write a value unless another rank has written one."""
        try:
            self._store.compare_set(name, "", json.dumps(value))
        except (RuntimeError, OSError) as error:
            raise StoreGoneError from error

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of those of these names that were written."""
        try:
            known = [name for name in names if name in self._seen or self._appears(name)]
            if not known:
                return {}
            found = self._store.multi_get(known) if self._many else [self._store.get(name) for name in known]
        except (RuntimeError, OSError) as error:
            raise StoreGoneError from error
        return {name: json.loads(value) for name, value in zip(known, found, strict=True)}

    def read_one(self, name: str) -> Any:
        """Return the value under a name; None if there is none."""
        return self.read([name]).get(name)

    def count(self, name: str, more: int = 0) -> int:
        """Add to a counter that all ranks share, and return its value."""
        try:
            return self._store.add(name, more)
        except (RuntimeError, OSError) as error:
            raise StoreGoneError from error

    def wait_for(self, names: Iterable[str], seconds: float) -> dict[str, Any]:
        """Return the values under these names as soon as all are written; after `seconds`, those that are."""
        wanted, deadline = list(names), time.monotonic() + seconds
        while True:
            found = self.read(wanted)
            if len(found) == len(wanted) or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def _appears(self, name: str) -> bool:
        if self._store.check([name]):
            self._seen.add(name)
            return True
        return False


@cache
def this_machine() -> str:
    """Return an id shared by processes that can see each other's process ids; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine runs; one that was killed and not yet waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
