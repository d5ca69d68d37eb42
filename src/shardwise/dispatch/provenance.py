"""Which plain tensors are known to be the same on all ranks.

A plain tensor may meet distributed ones only if it is replicated, and that is recorded where it is decided:

- the user says so for a block of code: `with implicit_replication():`;
- a tensor that was accepted in forward comes back in backward, when autograd hands out what it saved: the tensor itself
  was recorded (`record_replicated`), and so were views of it;
- PyTorch's derivative formulas make some tensors from sizes and numbers alone. While such a formula runs, its node of
  autograd says so (`enter_formula`, `leave_formula`).

Everything else is an error: also in hooks and in functions of the user that run in a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.backward_pass import current_node, current_pass, materialized, metadata_of
from ..sharding.base import DTensorBase
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec, contiguous_meta
from ..world import RankTensor, replicate
from .modes import modes

_recorded: Any = WeakTensorKeyDictionary()
"""The plain tensors that were accepted, by identity. A view is recorded as the tensor that it views."""

_RUNNING = "shardwise: backward passes that are in the formula of this node"


def taken_as_replicated(tensor: Tensor) -> bool:
    """Whether a plain tensor that meets distributed ones here is known to be the same on all ranks."""
    if modes.implicit_replication:
        return True
    return current_node() is not None and (in_formula() or _root(tensor) in _recorded)


def record_replicated(tensor: Tensor) -> None:
    """Remember that a plain tensor was accepted as replicated: autograd may have saved it for backward."""
    _recorded[_root(tensor)] = True


def _root(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


def as_replicated(tensor: Tensor, like: DTensorBase) -> DTensorBase:
    """A plain tensor that is the same on all ranks, as a replicated one on the mesh of another."""
    mesh_info = like._spec.mesh_info
    local = materialized(tensor.detach()).contiguous()
    meta = contiguous_meta(local.shape, local.dtype)
    if mesh_info.simulated and not isinstance(local, RankTensor):
        local = replicate(local, mesh_info.world_size)
    spec = DTensorSpec(mesh_info.mesh, (Replicate(),) * len(mesh_info.sizes), meta)
    return type(like).wrap(local, spec)


# ---- formulas -------------------------------------------------------------------------------------------------------
#
# A node holds the ids of the backward passes that are in its formula: two threads may run passes over one graph, and a
# pass that failed there must not count as running.


def enter_formula() -> None:
    """Take plain tensors as replicated from now on, in the formula of the node that autograd evaluates."""
    node = current_node()
    if node is not None:
        metadata_of(node).setdefault(_RUNNING, set()).add(current_pass())


def leave_formula() -> None:
    """End what `enter_formula` began."""
    node = current_node()
    if node is not None:
        metadata_of(node).get(_RUNNING, set()).discard(current_pass())


def in_formula() -> bool:
    """Whether the formula of the node that autograd evaluates runs, and makes tensors of its own."""
    node = current_node()
    return node is not None and current_pass() in metadata_of(node).get(_RUNNING, ())


@contextmanager
def outside_formula() -> Iterator[None]:
    """Inside, code that is no part of the running formula, such as a user's unpack hook, is held to the usual rule."""
    if not in_formula():
        yield
        return
    leave_formula()
    try:
        yield
    finally:
        enter_formula()
