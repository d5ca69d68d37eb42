"""Parameters and buffers of a module become distributed, each once, however many modules hold it.

>>> with tied_in(model):
...     distribute_parameter(model.embedding, "weight", mesh, [Shard(0)])
>>> model.head.weight is model.embedding.weight        # they were one, and still are
True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlacementError
from ..sharding.placement import Placement, Replicate
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor


class Ties:
    """Which modules hold which parameter or buffer, and by what name."""

    def __init__(self, root: nn.Module) -> None:
        self.owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._alive: list[Tensor] = []  # ids stay theirs while the tensors live
        for module in root.modules():
            for name, tensor in _own_tensors(module):
                self._alive.append(tensor)
                self.owners.setdefault(id(tensor), []).append((module, name))

    def put(self, old: Tensor, new: Tensor, module: nn.Module, name: str) -> None:
        """Replace a tensor of a module, and of all modules that hold it."""
        for owner, its_name in self.owners.get(id(old), [(module, name)]):
            _put(owner, its_name, new)

    def renew(self) -> None:
        """Where one owner of a tensor now has a distributed one, give it to those that still hold the plain one."""
        for key, owners in self.owners.items():
            held = [(module, name, dict(_own_tensors(module)).get(name)) for module, name in owners]
            new = next((tensor for _, _, tensor in held if isinstance(tensor, DTensor) and id(tensor) != key), None)
            for module, name, tensor in held:
                if new is not None and id(tensor) == key:
                    _put(module, name, new)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    table = module._parameters if name in module._parameters else module._buffers
    table[name] = tensor  # type: ignore[assignment]


_scopes: list[Ties] = []


@contextmanager
def tied_in(root: nn.Module) -> Iterator[Ties]:
    """Inside, a parameter that several modules of `root` hold is replaced in all of them."""
    ties = Ties(root)
    _scopes.append(ties)
    try:
        yield ties
    finally:
        _scopes.pop()


def distribute_parameter(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    src_data_rank: int | None = 0,
) -> None:
    """Replace a parameter or buffer of a module, and of those it is tied to, by a distributed one."""
    old = module._parameters.get(name, module._buffers.get(name))
    if old is None:
        return
    if isinstance(old, DTensor):
        _check_same(old, name, mesh, placements)
        return
    new = distribute_tensor(old, mesh, placements, src_data_rank=src_data_rank)
    new.__dict__.update(old.__dict__)
    if old.grad is not None:
        new.grad = distribute_tensor(old.grad, mesh, placements, src_data_rank=src_data_rank)
    ties = _scopes[-1] if _scopes else Ties(module)
    ties.put(old, new, module, name)


def _check_same(tensor: DTensor, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """Refuse to cut in a second way what is distributed already."""
    spec = tensor._spec
    try:
        same = distribute_tensor(tensor, mesh, placements) is tensor
    except PlacementError:
        same = False
    if not same:
        raise PlacementError(
            f"{name!r} is distributed already, as {spec!r} on {spec.mesh_info!r}, "
            f"and is to be cut by {list(placements)}",
            "cut it once; modules that share a parameter cut it in the same way",
        )


def replicate_rest(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Replicate the module's own parameters and buffers that are not distributed yet."""
    everywhere = (Replicate(),) * mesh.ndim
    for name, tensor in _own_tensors(module):
        if not isinstance(tensor, DTensor):
            distribute_parameter(module, name, mesh, everywhere, src_data_rank)
