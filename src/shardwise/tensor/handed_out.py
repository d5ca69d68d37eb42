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
from ..dispatch.watch import mark_exposed
from ..dispatch.writes import count_writes_through
from ..sharding.base import DTensorBase
from ..world import RankTensor

_CACHE = "_handed_out"


def hand_out(tensor: DTensorBase) -> Tensor:
    """Return the local shard of a tensor for the user: the same object each time, as long as the shard is."""
    try:
        local = tensor._shard
    except AttributeError:  # it comes from a source
        local = tensor._local_tensor
    before = tensor.__dict__.get(_CACHE)
    if before is not None and before[0] is local and before[1] is not None:
        found: Tensor = before[1]
        return found
    handed = _alias(tensor, local)
    if handed is not local:
        tensor.__dict__[_CACHE] = (local, handed)
    return handed


def hand_out_new(tensor: DTensorBase) -> Tensor:
    """Return the local shard of a tensor for the user, as a new object, for which autograd records a node.

    A tensor that hands out its shard a second time will do so again and again, as parameters do: from then on, it keeps
    the alias that others are quickly made from.
    """
    try:
        local = tensor._shard
    except AttributeError:
        local = tensor._local_tensor
    before = tensor.__dict__.get(_CACHE)
    if before is not None and before[0] is local:
        handed = (hand_out(tensor) if before[1] is None else before[1]).detach()
        count_writes_through(handed)
        return handed
    handed = _alias(tensor, local)
    if handed is local:
        return handed.detach()
    tensor.__dict__[_CACHE] = (local, None)
    return handed


def exposed(tensor: Any) -> Tensor:
    """The local shard of a gradient: no backward pass needs it unless it is differentiable itself."""
    if tensor.requires_grad:
        found: Tensor = tensor.to_local()
        return found
    local: Tensor = tensor._local_tensor
    mark_exposed(local)
    return local


def _alias(tensor: DTensorBase, local: Tensor) -> Tensor:
    """Return the local shard as another object, whose writes count as writes to the tensor.

    The shard itself where they cannot be counted so: inference tensors have no versions, modes and compilers would see
    an op that is not one, and tensors of other classes may not survive a copy.
    """
    mark_exposed(local)
    if (
        not (type(local) is Tensor or isinstance(local, RankTensor))
        or count_modes()
        or transforms_active()
        or torch.is_inference_mode_enabled()
        or tensor.is_inference()
        or local.is_inference()
    ):
        return local
    handed = counted_as(tensor)
    count_writes_through(handed)
    return handed
