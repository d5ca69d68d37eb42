"""Collectives on Python objects raise errors in a simulated world: its ranks share the objects of this process.

A program that gathers objects would get only those of this process. `torch.distributed.checkpoint` gathers objects
unless it is called with `no_dist=True`; `shardwise.checkpoint` does not need them. A broadcast does nothing: all ranks
have the sender's objects already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from ..errors import WorldError

_NAMES = ("all_gather_object", "gather_object", "scatter_object_list")
_BROADCAST = "broadcast_object_list"
_MODULES = (dist, dist.distributed_c10d)


class ObjectCollectivesRefused:
    """From `start` to `stop`, the functions of torch.distributed that move objects raise an error."""

    def __init__(self) -> None:
        self._originals: dict[str, Callable[..., object]] = {}

    def start(self) -> None:
        """Replace the functions."""
        self._originals = {name: getattr(dist, name) for name in (*_NAMES, _BROADCAST)}
        for name in _NAMES:
            self._set(name, _refusal(name))
        self._set(_BROADCAST, _nothing)

    def stop(self) -> None:
        """Restore the functions."""
        for name, function in self._originals.items():
            self._set(name, function)

    def _set(self, name: str, function: Callable[..., object]) -> None:
        for module in _MODULES:
            setattr(module, name, function)


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing, in the place of a broadcast: the ranks share their objects."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise WorldError(
            f"torch.distributed.{name} in a simulated world: all ranks are in this process and share its objects",
            "use the object itself; for checkpoints use shardwise.checkpoint, or pass no_dist=True to "
            "torch.distributed.checkpoint.save and load",
        )

    return refuse
