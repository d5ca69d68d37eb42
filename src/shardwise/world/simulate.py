"""Enter and leave a simulated world: all ranks in this process, in lockstep, with no launcher.

>>> with simulate(8) as world:
...     mesh = torch.distributed.init_device_mesh("cpu", (2, 4))
...     world.size, torch.distributed.get_world_size()
(8, 8)

PyTorch keeps its process groups in module tables, and the default group in a global. A world puts both
aside, starts a fake default group (its own collectives move nothing; collectives.py does the work), and puts
all back when it is left. Groups that were there before, a live gloo group say, are neither seen nor harmed.

All use of PyTorch's private process-group tables is in this file.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import WorldError
from ..sharding.runtime import end_world, runtime_of_world
from .registry import World, active, register_group

__all__ = ["SimulatedWorld", "simulate"]

c10d: Any = distributed_c10d  # the private parts have no types

# Groups are named by a counter. Each world counts in a range of its own, so that no name of a world is ever
# used again: a group that outlives its world is unknown in the next one, never mistaken for another.
_RANGE = 10**6
_ranges = itertools.count(_RANGE, _RANGE)

_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


def simulate(ranks: int) -> SimulatedWorld:
    """A world of `ranks` ranks in this process: use it in `with`, as a decorator, or by `start` and `stop`.

    On an accelerator all ranks share the current device: `init_device_mesh("cuda", (8,))` needs one GPU.
    """
    return SimulatedWorld(ranks)


class SimulatedWorld(World, ContextDecorator):
    """A simulated world; see `simulate`. Worlds nest, and are left in the opposite order."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._outside: _Outside | None = None

    def start(self) -> SimulatedWorld:
        """Enter the world: until `stop`, the default process group has `size` simulated ranks."""
        if self._outside is not None:
            raise WorldError(f"{self!r} is started twice", "make another world to nest one")
        outside = _Outside()
        try:
            _start_fake_group(self.size)
        except BaseException:
            outside.restore()
            raise
        self._outside = outside
        active.append(self)
        self.groups = {}
        register_group(c10d._get_default_group().group_name, [range(self.size)])
        runtime_of_world()  # from now on the active one: meshes of an outer world are not found in this one
        return self

    def stop(self) -> None:
        """Leave the world: process groups are again as they were before `start`."""
        if self._outside is None or active[-1] is not self:
            raise WorldError(
                f"{self!r} is stopped, but the innermost running world is {active[-1] if active else None!r}",
                "stop worlds in the opposite order of their start, each once",
            )
        active.pop()
        end_world(c10d._world.default_pg)
        outside, self._outside = self._outside, None
        outside.restore()

    def _recreate_cm(self) -> SimulatedWorld:
        return SimulatedWorld(self.size)  # each decorated call has its own

    def __enter__(self) -> SimulatedWorld:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"SimulatedWorld(size={self.size})"


class _Outside:
    """PyTorch's process groups as they are when this is made, put aside until `restore`."""

    def __init__(self) -> None:
        world: Any = c10d._world
        self.default = world.default_pg
        self.count = world.group_count
        self.init_method = c10d._default_pg_init_method
        self.tables = {name: dict(getattr(world, name)) for name in _TABLES}
        # Not replaced: other modules hold the very objects. Emptied, so that a program that ends with
        # destroy_process_group() ends its simulated groups and no others.
        for name in _TABLES:
            getattr(world, name).clear()
        world.default_pg = None
        world.group_count = next(_ranges)

    def restore(self) -> None:
        world: Any = c10d._world
        for group in world.pg_names.values():
            c10d._unregister_process_group(group)
        for name, table in self.tables.items():
            now = getattr(world, name)
            now.clear()
            now.update(table)
        world.default_pg = self.default
        world.group_count = self.count
        c10d._default_pg_init_method = self.init_method
        for pg, name in self.tables["pg_names"].items():
            _register_again(name, pg)


def _register_again(name: str, pg: dist.ProcessGroup) -> None:
    """Undo what destroy_process_group() in the world did to an outer group: it forgets all names."""
    try:
        c10d._resolve_process_group(name)
    except (RuntimeError, LookupError, ValueError):
        c10d._register_process_group(name, pg)


def _start_fake_group(size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    hook = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    # Initialising chains a hook that marks tracebacks with "[rank0]". All ranks are here, and it piles up.
    sys.excepthook = hook
