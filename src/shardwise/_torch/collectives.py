"""Process groups by name: functional collectives take the name of a group, not the group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this rank with this name. Relies on `_resolve_process_group`."""
    return _resolve(name)


def group_is_registered(group: dist.ProcessGroup) -> bool:
    """Whether a group is still known by its name, that is, has not been destroyed."""
    try:
        return group_named(group.group_name) is group
    except (RuntimeError, LookupError, ValueError):
        return False
