"""An LRU cache bounded in bytes.

>>> cache = Cache(max_bytes=1 << 20, size_of=lambda key, value: len(value))
>>> cache["a"] = b"12345"
>>> cache.get("a"), cache.nbytes
(b'12345', 5)

A hit must cost no more than a look-up in a dict, so entries carry no time of last use. They are kept in two
generations: what was used since the last rotation (`recent`), and what was in use before it (`older`). A hit in `older`
moves the entry to `recent`. When `recent` has filled half of the budget, `older` is dropped and the generations rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar, cast

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")

ENTRY_BYTES = 256
"""The bytes of an entry besides its value: a slot in the table, and a key of a few pointers."""


class Cache(Generic[K, V]):
    """A table of at most about `max_bytes`; `size_of(key, value)` returns the bytes of an entry."""

    __slots__ = ("_older_bytes", "_recent_bytes", "_size_of", "max_bytes", "older", "recent")

    def __init__(self, max_bytes: int, size_of: Callable[[K, V], int]) -> None:
        self.max_bytes, self._size_of = max_bytes, size_of
        self.recent: dict[K, V] = {}
        """Looked up directly by the hot path: the same dict for the life of the cache."""
        self.older: dict[K, V] = {}
        self._recent_bytes = self._older_bytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all entries, by `size_of`."""
        return self._recent_bytes + self._older_bytes

    def __len__(self) -> int:
        return len(self.recent) + len(self.older)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        found = self.recent.get(key)
        if found is None and self.older:
            found = self.older.get(key)
            if found is not None:
                self[key] = found
        return found

    def __setitem__(self, key: K, value: V) -> None:
        if (before := self.recent.get(key)) is not None:
            self._recent_bytes -= self._size_of(key, before)
        elif (before := self.older.pop(key, None)) is not None:
            self._older_bytes -= self._size_of(key, before)
        self.recent[key] = value
        self._recent_bytes += self._size_of(key, value)
        if self._recent_bytes > self.max_bytes // 2:
            self.older, self._older_bytes = dict(self.recent), self._recent_bytes
            self.recent.clear()
            self._recent_bytes = 0

    def clear(self) -> None:
        """Remove all entries."""
        self.recent.clear()
        self.older.clear()
        self._recent_bytes = self._older_bytes = 0


def cached_within(max_bytes: int, size_of: Callable[[Any], int]) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """Cache the results of a pure function of hashable arguments, in at most about `max_bytes`.

    For results whose sizes vary widely; `size_of(result)` returns the bytes of one. Where all are small, `lru_cache` is
    bounded, too, and quicker: 16,384 entries with a layout in each take about 11 MB.

    >>> @cached_within(1 << 20, size_of=lambda divisors: 36 * len(divisors))
    ... def divisors_of(number):
    ...     return tuple(d for d in range(1, number + 1) if number % d == 0)
    """

    def decorate(function: Callable[P, V]) -> Callable[P, V]:
        cache: Cache[tuple[Hashable, ...], V] = Cache(max_bytes, lambda key, value: ENTRY_BYTES + size_of(value))

        @wraps(function)
        def cached(*args: P.args, **kwargs: P.kwargs) -> V:
            key = cast(tuple[Hashable, ...], (*args, *kwargs.items()) if kwargs else args)
            found = cache.get(key)
            if found is None:
                found = cache[key] = function(*args, **kwargs)
            return found

        cached.cache = cache  # type: ignore[attr-defined]
        return cached

    return decorate
