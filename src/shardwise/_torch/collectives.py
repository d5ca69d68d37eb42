"""Functional collectives, and the process groups they name.

The public functions of `torch.distributed._functional_collectives` cost six times as much as the overloads they call,
so the overloads are called directly. Each takes the name of a group, starts its collective, and returns a tensor that
holds the result once `wait` has returned it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines more ops: _c10d_functional::_wrap_tensor_autograd

_ops = torch.ops._c10d_functional

all_gather = _ops.all_gather_into_tensor.default
"""`all_gather(input, ranks, group)`: the inputs of all ranks, concatenated along dim 0 in group order."""
all_reduce = _ops.all_reduce.default
"""`all_reduce(input, op, group)`: the elementwise reduction of the inputs, on every rank."""
all_reduce_ = _ops.all_reduce_.default
"""`all_reduce_(input, op, group)`: `all_reduce` in the memory of the input."""
reduce_scatter = _ops.reduce_scatter_tensor.default
"""`reduce_scatter(input, op, ranks, group)`: this rank's chunk along dim 0 of the reduction of the inputs."""
all_to_all = _ops.all_to_all_single.default
"""`all_to_all(input, received_sizes, sent_sizes, group)`: one chunk along dim 0 from each rank, in group order."""
broadcast = _ops.broadcast.default
"""`broadcast(input, source, group)`: the input of the rank at this index of the group."""
WAIT = _ops.wait_tensor.default
"""The op that waits for a collective, as an overload: recorded programs refer to it."""
wait = WAIT._op
"""`wait(tensor)`: the same tensor, once the collective that fills it is done. It has no Python frame around it."""

all_reduce_coalesced = _ops.all_reduce_coalesced.default
"""`all_reduce_coalesced(inputs, op, group)`: `all_reduce` of each tensor of a list, in one collective."""

_resolve: Callable[..., dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group of this rank with this name. Relies on `_resolve_process_group`."""
    return _resolve(name)


def group_is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether a group is still registered under its name, so that it was not destroyed."""
    try:
        return group_named(group.group_name) is group
    except (RuntimeError, LookupError, ValueError):
        return False
