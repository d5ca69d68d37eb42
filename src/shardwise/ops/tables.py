"""Temporary: the old tables, each of which amends the records."""

# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

from typing import Any

from .op import Local
from .registry import amend, registry

__all__ = ["ListKernel"]


class _Table(dict):
    def __init__(self, make):
        self.make = make

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        amend(key, **self.make(key, value))

    def update(self, other):
        for key, value in other.items():
            self[key] = value


class _Set(set):
    def __init__(self, make):
        self.make = make

    def add(self, key):
        super().add(key)
        amend(key, **self.make(key))

    def update(self, keys):
        for key in keys:
            self.add(key)

    def __ior__(self, keys):
        self.update(keys)
        return self


def _local(key) -> Local:
    return registry._built_in[key].local


LOCAL: Any = _Table(lambda key, run: {"local": Local(run)})
ONLY_SUMMED: Any = _Set(lambda key: {"local": _local(key)._replace(when="partial sum")})
ONLY_EMPTY: Any = _Set(lambda key: {"local": _local(key)._replace(when="empty shard")})
COPIED: Any = _Set(lambda key: {"local": _local(key)._replace(copies=True)})
DRAWS: Any = _Table(lambda key, run: {"draw": run})
LISTS: Any = _Table(lambda key, kernel: {"list_kernel": kernel})
INSTEAD: Any = _Table(lambda key, run: {"decomposition": run})
IN_PYTHON: Any = _Table(lambda key, run: {"python": run})
READS_SCALARS: Any = _Set(lambda key: {"reads_numbers": True})
KEEPS_SIZES: Any = _Set(lambda key: {"keeps_sizes": True})
COPES_WITH_EMPTY: Any = _Set(lambda key: {"takes_empty": True})
UNREAD: Any = _Set(lambda key: {"reads_shape_only": True})
UNREAD.update({f"aten::{name}" for name in ("rand_like", "randn_like")})


def register(name, rule, kernels=None):
    amend(name, rule=rule, kernels=dict(kernels or {}))


def register_table(rules):
    for name, rule in rules.items():
        register(name, rule)
