"""Local shards exposed to the user: a write to one counts as a write to its distributed tensor.

>>> y = x * x
>>> with torch.no_grad():
...     x.to_local().zero_()
>>> y.sum().backward()          # an error, as on one device: backward needs x as it was
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.modes import count_modes
from .._torch.transforms import transforms_active
from .._torch.wrapper import counted_as
from ..dispatch.memory_notes import MemoryNotes
from ..dispatch.watch import mark_exposed
from ..dispatch.writes import count_writes_through
from ..sharding.base import DTensorBase
from ..world import RankTensor

_in_inference_mode = torch.is_inference_mode_enabled


_HandedOut = tuple[Tensor, Tensor | None, tuple[MemoryNotes, ...]]
"""A local shard that was handed out, its alias, and the notes on its memory. A plain tuple, which is made quickest.

There is no alias until the shard is handed out a second time.
"""


def hand_out(tensor: DTensorBase) -> Tensor:
    """Return the local shard of a tensor for the user: the same object each time, until the tensor gets another."""
    try:
        local = tensor._shard
    except AttributeError:  # it comes from a source
        local = tensor._local_shard
    before: _HandedOut | None = tensor._handed_out
    if before is not None and before[0] is local and before[1] is not None:
        return before[1]
    return _first_alias(tensor, local, keep=True)


def hand_out_new(tensor: DTensorBase) -> Tensor:
    """Return the local shard of a tensor for the user, as a new object, for which autograd records a node.

    A tensor that hands out its shard a second time is likely to do so again and again, as parameters do: from then on
    it caches the alias, of which new ones are quickly made.
    """
    try:
        local = tensor._shard
    except AttributeError:
        local = tensor._local_shard
    before: _HandedOut | None = tensor._handed_out
    if before is None or before[0] is not local:
        handed = _first_alias(tensor, local, keep=False)
        return handed.detach() if handed is local else handed
    handed = (hand_out(tensor) if before[1] is None else before[1]).detach()
    count_writes_through(handed, before[2])
    return handed


def _first_alias(tensor: DTensorBase, local: Tensor, keep: bool) -> Tensor:
    """Return an alias of the local shard, writes to which count as writes to the tensor; `keep` caches it."""
    memory = mark_exposed(local)
    if not _can_be_counted(tensor, local):
        return local
    handed = counted_as(tensor)
    count_writes_through(handed, memory)
    tensor._handed_out = (local, handed if keep else None, memory)
    return handed


def exposed(tensor: Any) -> Tensor:
    """Return the local shard of a gradient for the user. Writes are counted only if a backward pass may need it."""
    if tensor.requires_grad:
        found: Tensor = tensor.to_local()
        return found
    local: Tensor = tensor._local_shard
    mark_exposed(local)
    return local


def _can_be_counted(tensor: DTensorBase, local: Tensor) -> bool:
    """Return whether an alias of the local shard can share the version counter of the tensor.

    Inference tensors have no versions, modes and compilers would see an op that the program does not call, and tensors
    of other classes may not survive a copy.
    """
    return not (
        count_modes()
        or transforms_active()
        or _in_inference_mode()
        or local.is_inference()
        or tensor.is_inference()
        or (type(local) is not Tensor and not isinstance(local, RankTensor))
    )
