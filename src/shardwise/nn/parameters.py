"""Replace the parameters and buffers of a module by distributed ones; tied parameters stay tied.

>>> with keep_ties(model):
...     distribute_parameter(model.embedding, "weight", mesh, [Shard(0)])
>>> model.head.weight is model.embedding.weight        # as before
True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlacementError
from ..sharding.placement import Placement, Replicate
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor


class Ties:
    """For each parameter and buffer below a root module: the modules that own it, and its name in each."""

    def __init__(self, root: nn.Module) -> None:
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._alive: list[Tensor] = []  # an id is unique only while its tensor lives
        for module in root.modules():
            for name, tensor in own_tensors(module).items():
                self._alive.append(tensor)
                self._owners.setdefault(id(tensor), []).append((module, name))

    def replace(self, old: Tensor, new: Tensor, module: nn.Module, name: str) -> None:
        """Replace a tensor of `module` in every module that owns it."""
        for owner, its_name in self._owners.get(id(old), [(module, name)]):
            setattr(owner, its_name, new)

    def propagate(self) -> None:
        """Where one owner of a tensor has replaced it by a distributed one, give that to its other owners."""
        for key, owners in self._owners.items():
            held = [(module, name, own_tensors(module).get(name)) for module, name in owners]
            new = next((tensor for _, _, tensor in held if isinstance(tensor, DTensor) and id(tensor) != key), None)
            for module, name, tensor in held:
                if new is not None and id(tensor) == key:
                    setattr(module, name, new)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module itself owns, by name."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


_ties: ContextVar[Ties | None] = ContextVar("ties", default=None)


@contextmanager
def keep_ties(root: nn.Module) -> Iterator[Ties]:
    """Inside, `distribute_parameter` replaces a parameter in all modules below `root` that own it."""
    ties = Ties(root)
    token = _ties.set(ties)
    try:
        yield ties
    finally:
        _ties.reset(token)


def distribute_parameter(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    src_data_rank: int | None = 0,
) -> None:
    """Replace a parameter or buffer of a module, and of those it is tied to, by a distributed one.

    Does nothing if the module has none of this name.
    """
    old = own_tensors(module).get(name)
    if old is None:
        return
    if isinstance(old, DTensor):
        _check_same(old, name, mesh, placements)
        return
    new = distribute_tensor(old, mesh, placements, src_data_rank=src_data_rank)
    new.__dict__.update(old.__dict__)
    if old.grad is not None:
        new.grad = distribute_tensor(old.grad, mesh, placements, src_data_rank=src_data_rank)
    ties = _ties.get() or Ties(module)
    ties.replace(old, new, module, name)


def _check_same(tensor: DTensor, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """Raise if a parameter is distributed already, with other placements or on another mesh."""
    spec = tensor._spec
    try:
        same = distribute_tensor(tensor, mesh, placements) is tensor
    except PlacementError:
        same = False
    if not same:
        raise PlacementError(
            f"{name!r} is distributed already, as {spec!r} on {spec.mesh_info!r}, "
            f"and cannot also have the placements {list(placements)}",
            "give all modules that share a parameter the same placements for it",
        )


def replicate_rest(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Replicate the module's own parameters and buffers that are not distributed yet."""
    replicated = (Replicate(),) * mesh.ndim
    for name, tensor in own_tensors(module).items():
        if not isinstance(tensor, DTensor):
            distribute_parameter(module, name, mesh, replicated, src_data_rank)
