"""Entering and leaving a simulated world: all ranks in this process, in lockstep, without a launcher.

>>> with simulate(8) as world:
...     mesh = torch.distributed.init_device_mesh("cpu", (2, 4))
...     world.size, torch.distributed.get_world_size()
(8, 8)

A world removes PyTorch's process groups from its tables, starts a fake default group that moves no data (the
collectives of RankTensors do: `functional_ops`), and restores the groups when it is left. Groups that existed before, a
live gloo group for example, can be neither seen nor changed from inside.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

import torch.distributed as dist

from .._torch.c10d import SavedProcessGroups, start_fake_group
from ..errors import WorldError
from ..sharding.runtime import end_world, runtime_of_world
from .object_collectives import ObjectCollectivesRefused
from .registry import World, active, register_group

__all__ = ["SimulatedWorld", "simulate"]


def simulate(ranks: int) -> SimulatedWorld:
    """Return a world of `ranks` ranks in this process: use it in `with`, as a decorator, or with `start` and `stop`.

    On an accelerator all ranks share the current device: `init_device_mesh("cuda", (8,))` needs one GPU.

    >>> with simulate(4):
    ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    ...     x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    ...     x.shards[3]
    tensor([6., 7.])
    """
    return SimulatedWorld(ranks)


class SimulatedWorld(World, ContextDecorator):
    """A simulated world; see `simulate`. Worlds nest, and the innermost one is left first.

    >>> world = simulate(8).start()
    >>> world.size
    8
    >>> world.stop()
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._outer: SavedProcessGroups | None = None
        self._group: dist.ProcessGroup | None = None
        self._refused = ObjectCollectivesRefused()

    def start(self) -> SimulatedWorld:
        """Enter the world: until `stop`, the default process group has `size` simulated ranks."""
        if self._outer is not None:
            raise WorldError(f"{self!r} was started twice", "make another world to nest one: simulate(...)")
        self._outer = SavedProcessGroups()
        active.append(self)
        self._refused.start()
        try:
            group = self._group = start_fake_group(self.size)
            self.groups = {}
            register_group(group.group_name, [range(self.size)])
            for world in active:
                # A new runtime drops those of worlds whose group is unknown by name. The outer worlds have not ended,
                # even if the program has destroyed all process groups that it could see.
                if isinstance(world, SimulatedWorld) and world._outer is not None:
                    world._outer.register_names()
            runtime_of_world()
        except BaseException:
            self._leave()
            raise
        return self

    def stop(self) -> None:
        """Leave the world: process groups are again as they were before `start`."""
        if self._outer is None or active[-1] is not self:
            raise WorldError(
                f"{self!r} is stopped, but the innermost running world is {active[-1] if active else None!r}",
                "stop each world once, the one started last first",
            )
        self._leave()

    def _leave(self) -> None:
        """Restore the outer process groups, drop this world's runtime and activate the outer one."""
        assert self._outer is not None
        outer, self._outer = self._outer, None
        active.remove(self)
        self._refused.stop()
        ended, self._group = (self._group, dist.group.WORLD), None
        outer.restore()
        end_world(*ended)
        if dist.is_initialized():
            runtime_of_world()

    def _recreate_cm(self) -> SimulatedWorld:
        return SimulatedWorld(self.size)  # each call of a decorated function has its own world

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
