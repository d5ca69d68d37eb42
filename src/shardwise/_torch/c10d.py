"""Process groups: the tables in which torch.distributed keeps them, and the fake backend.

torch.distributed stores its groups in tables of one object (`_world`), with the default group and the counter by which
new groups are named. The name of each group is registered in C++, too, where functional collectives look it up.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C import ScriptObject
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d

__all__ = ["SavedProcessGroups", "finished_work", "group_of_members", "start_fake_group"]

_c10d: Any = distributed_c10d  # its private names have no types

_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)

# Every snapshot starts a range of group names that is never used again. A group that outlives its world is then
# unknown in the next one, and cannot be mistaken for a group of the same name.
_NAMES_PER_SNAPSHOT = 10**6
_first_names = itertools.count(_NAMES_PER_SNAPSHOT, _NAMES_PER_SNAPSHOT)


class SavedProcessGroups:
    """A snapshot of all process groups, taken out of PyTorch's tables until `restore`.

    In between there is no default group, and `destroy_process_group()` destroys only groups made since the snapshot.
    """

    def __init__(self) -> None:
        world = _c10d._world
        self._default = world.default_pg
        self._count = world.group_count
        self._init_method = _c10d._default_pg_init_method
        self._tables = {name: dict(getattr(world, name)) for name in _TABLES}
        for name in _TABLES:  # emptied, not replaced: other modules hold references to the tables
            getattr(world, name).clear()
        world.default_pg = None
        world.group_count = next(_first_names)

    def restore(self) -> None:
        """Drop the groups made since the snapshot, and put those of the snapshot back."""
        world = _c10d._world
        for name in world.pg_names.values():
            _c10d._unregister_process_group(name)
        for table, saved in self._tables.items():
            now = getattr(world, table)
            now.clear()
            now.update(saved)
        world.default_pg = self._default
        world.group_count = self._count
        _c10d._default_pg_init_method = self._init_method
        self.register_names()

    def register_names(self) -> None:
        """Register the names of the saved groups in C++ again, where `destroy_process_group()` unregistered them.

        It unregisters all names, not only those of the groups that it destroys.
        """
        for group, name in self._tables["pg_names"].items():
            try:
                _c10d._resolve_process_group(name)
            except (RuntimeError, LookupError, ValueError):
                _c10d._register_process_group(name, group)


def start_fake_group(size: int) -> dist.ProcessGroup:
    """Initialise and return a default group of `size` ranks, this process being rank 0, that communicates nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    hook = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    # Initialising chains a hook that prefixes tracebacks with "[rank0]": wrong for a process that holds all ranks, and
    # one more in the chain for every group.
    sys.excepthook = hook
    group = dist.group.WORLD
    assert group is not None
    return group


def group_of_members(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Return a new group with this name, of these ranks in this order. Only its members call this.

    `dist.new_group` makes names from the number of groups that a process is in, also with `use_local_synchronization`,
    so that members could wait for each other under different names. If the default group is bound to a device, it
    splits that group's communicator, which ranks outside would have to join. Relies on `_new_process_group_helper`,
    and on it reading `bound_device_id`.
    """
    world = _c10d._world
    default = _c10d._get_default_group()
    backend, store = world.pg_map[default]
    members = list(ranks)
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        place = members.index(default.rank())
        options = {"timeout": _c10d._get_default_timeout(backend), "device_id": bound, "group_desc": "shardwise"}
        group, _ = _c10d._new_process_group_helper(len(members), place, members, backend, store, name, **options)
    finally:
        default.bound_device_id = bound
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


def finished_work() -> ScriptObject:
    """Return the handle of a finished communication, as the ops of `torch.ops.c10d` return it."""
    return FakeWork().boxed()
