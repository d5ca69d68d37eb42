"""Replace the parameters and buffers of a module by distributed ones; tied parameters stay tied.

>>> with keep_ties(model):
...     distribute_parameter(model.embedding, "weight", mesh, [Shard(0)])
>>> model.head.weight is model.embedding.weight        # as before
True
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt
from ..errors import PlacementError
from ..sharding.placement import Placement, Placements, Replicate
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor
from .replaced import copy_attributes, record_replacement, replacement_of


class Owner(NamedTuple):
    """A module that owns a parameter or buffer, its name in the module, and its path from the root."""

    module: nn.Module
    name: str
    path: str

    @property
    def tensor(self) -> Tensor | None:
        """The parameter or buffer that the module has under this name now."""
        return own_tensors(self.module).get(self.name)


class Ties:
    """All parameters and buffers below a root module, each with its owners."""

    def __init__(self, root: nn.Module) -> None:
        self._found: dict[int, tuple[Tensor, list[Owner]]] = {}  # holds the tensors, so ids stay valid
        for path, module in root.named_modules():
            for name, tensor in own_tensors(module).items():
                owner = Owner(module, name, f"{path}.{name}" if path else name)
                self._found.setdefault(id(tensor), (tensor, []))[1].append(owner)

    def owners(self, tensor: Tensor) -> list[Owner]:
        """Return the owners of a parameter or buffer; the first has the name that `named_parameters` gives it."""
        return self._found.get(id(tensor), (tensor, []))[1]

    def replace(self, old: Tensor, new: DTensor, module: nn.Module, name: str) -> None:
        """Replace a tensor of `module` in every module that owns it."""
        for owner in self.owners(old) or [Owner(module, name, name)]:
            setattr(owner.module, owner.name, new)
        record_replacement(old, new)

    def restore(self) -> None:
        """Set a distributed tensor that replaced a tied one in some of its owners on all of them.

        Raises PlacementError if owners have replaced it by different ones.
        """
        for old, owners in self._found.values():
            changed = [
                (owner, tensor) for owner in owners if (tensor := owner.tensor) is not None and tensor is not old
            ]
            if not changed:
                continue
            first, new = changed[0]
            for owner, other in changed[1:]:
                if not _same_kind(new, other):
                    raise _untied(first, new, owner, other)
            if isinstance(new, DTensor):
                self.replace(old, new, first.module, first.name)


def _same_kind(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors made from one parameter can be tied again."""
    if one is other:
        return True
    return isinstance(one, DTensor) and isinstance(other, DTensor) and one._spec is other._spec


def _untied(first: Owner, one: Tensor, second: Owner, other: Tensor) -> PlacementError:
    specs = [f"{t._spec!r}" if isinstance(t, DTensor) else f"a plain {list(t.shape)}" for t in (one, other)]
    return PlacementError(
        f"{first.path!r} and {second.path!r} were one tied parameter, and partition_fn has made them "
        f"{specs[0]} and {specs[1]}: they would be trained apart",
        "give both the same placements, or untie them before, e.g. b.weight = nn.Parameter(b.weight.clone())",
    )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module itself owns, by name."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


_ties: ContextVar[Ties | None] = ContextVar("ties", default=None)


@contextmanager
def keep_ties(root: nn.Module) -> Iterator[Ties]:
    """Let `distribute_parameter`, inside, replace a parameter in all modules below `root` that own it.

    A nested block has no effect: the outer root contains the inner one.
    """
    outer = _ties.get()
    if outer is not None:
        yield outer
        return
    _warn_of_meta_buffers(root)
    ties = Ties(root)
    token = _ties.set(ties)
    try:
        yield ties
    finally:
        _ties.reset(token)


def _warn_of_meta_buffers(root: nn.Module) -> None:
    """Warn of buffers without data that neither `to_empty` nor a checkpoint will fill."""
    meta = [name for name, buffer in root.named_buffers() if buffer.is_meta]
    lost = sorted(set(meta) - set(root.state_dict())) if meta else []
    if lost:
        warnings.warn(
            f"the buffers {', '.join(lost)} are on the meta device and are not persistent: to_empty() leaves them "
            "uninitialised, and no state dict has them; compute them again after to_empty()",
            stacklevel=4,
        )


def distribute_parameter(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placements: Placements,
    src_data_rank: int | None = 0,
) -> None:
    """Replace a parameter or buffer of a module, and of those it is tied to, by a distributed one.

    Does nothing if the module has none of this name.
    """
    old = own_tensors(module).get(name)
    if old is None:
        return
    made = old if isinstance(old, DTensor) else replacement_of(old, adopt(mesh))
    if made is not None:
        _check_same(made, name, mesh, placements)
        setattr(module, name, made)
        return
    new = distribute_tensor(old, mesh, placements, src_data_rank=src_data_rank)
    copy_attributes(old, new)
    if old.grad is not None:
        new.grad = distribute_tensor(old.grad, mesh, placements, src_data_rank=src_data_rank)
        old.grad = None
    ties = _ties.get() or Ties(module)
    ties.replace(old, new, module, name)


def _check_same(tensor: DTensor, name: str, mesh: DeviceMesh, placements: Placements) -> None:
    """Raise if a parameter is distributed already, with other placements or on another mesh."""
    spec = tensor._spec
    try:
        same = distribute_tensor(tensor, mesh, placements) is tensor
    except PlacementError:
        same = False
    if not same:
        wanted: object = list(placements) if isinstance(placements, (list, tuple)) else placements
        raise PlacementError(
            f"{name!r} is distributed already, as {spec!r} on {spec.mesh_info!r}, "
            f"and cannot also have the placements {wanted}",
            "give all modules that share a parameter the same placements for it",
        )


def replicate_rest(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Replicate the module's own parameters and buffers that are not distributed yet."""
    replicated: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    for name, tensor in own_tensors(module).items():
        if isinstance(tensor, DTensor):
            continue
        made = replacement_of(tensor, adopt(mesh))
        if made is not None:  # shared with a module that was distributed before
            setattr(module, name, made)
        else:
            distribute_parameter(module, name, mesh, replicated, src_data_rank)
