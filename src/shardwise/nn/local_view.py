"""Local parameters for a replicated module while it computes on local tensors.

While such a module runs on local inputs, its parameters are replaced by their local shards. These come from `to_local`,
so gradients flow back to the distributed parameters, averaged over the ranks.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from .._torch.collectives import broadcast, wait
from .._torch.modules import buffers_of, parameters_of
from .._torch.pytree import tree_leaves
from ..dispatch.writes import writes_to
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Partial, Placement
from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor

_VIEW = "_local_view_of_shardwise"


class Owner(ref[nn.Module]):
    """A weak reference from a view to a module, which holds the view. A deep copy refers to the copied module."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, object]) -> Owner:
        module = self()
        return self if module is None else Owner(copy.deepcopy(module, memo))

    def __reduce__(self) -> tuple[object, ...]:
        module = self()
        return Owner, (nn.Module() if module is None else module,)


class Shown(NamedTuple):
    """A parameter or buffer to replace during a call.

    `spec` is that of the replacement on a mesh of the other axes, or None if it is a plain local tensor.
    """

    owner: Owner
    name: str
    spec: DTensorSpec | None


class LocalView:
    """Sets local parameters on a module during the outermost call of the module or of one of its submodules."""

    def __init__(self, data: MeshInfo, shown: list[Shown], broadcast_buffers: bool) -> None:
        self.data, self.shown, self.broadcast_buffers = data, shown, broadcast_buffers
        self._running: list[nn.Module] = []
        self._hidden: list[tuple[Shown, DTensor, Tensor, object]] = []

    def watch(self, root: nn.Module) -> None:
        """Register hooks on the module and on its submodules, which may be called alone, e.g. again in backward."""
        for module in root.modules():
            if _VIEW not in module.__dict__:  # else an earlier call of replicate gave it a view
                module.__dict__[_VIEW] = self  # where hooks find it: a deep copy of the module gets a copy of the view
                module.register_forward_pre_hook(_before, with_kwargs=True, prepend=True)  # before those of styles
                module.register_forward_hook(_after, always_call=True)

    def enter(self, module: nn.Module, inputs: object) -> None:
        """Set local parameters before a call on local inputs."""
        if not self._running and not any(map(self._is_distributed, tree_leaves(inputs))):
            self._show()
        self._running.append(module)

    def leave(self, module: nn.Module) -> None:
        """Restore the parameters after a call, also after an error."""
        if module in self._running:
            while self._running.pop() is not module:
                pass
        if not self._running and self._hidden:
            self._hide()

    def _is_distributed(self, value: object) -> bool:
        return isinstance(value, DTensor) and set(self.data.names) <= set(value._spec.mesh_info.names)

    def _show(self) -> None:
        made: dict[int, Tensor] = {}
        for each in self.shown:
            owner = each.owner()
            if owner is None:  # the user has replaced this submodule
                continue
            tensors = _tensors(owner, each.name)
            tensor = tensors.get(each.name)
            if isinstance(tensor, DTensor):
                local = made.get(id(tensor))
                if local is None:
                    local = made[id(tensor)] = self._local(tensor, each.spec)
                tensors[each.name] = local
                written = None if tensors is parameters_of(owner) else writes_to(tensor._local_shard) or ()
                self._hidden.append((each, tensor, local, written))

    def _local(self, tensor: DTensor, spec: DTensorSpec | None) -> Tensor:
        """Return the local tensor; its gradient is averaged over the data axes that do not shard it."""
        names = tensor._spec.mesh_info.names
        average: list[Placement] = [
            Partial("avg") if axis in self.data.names and not placement.is_shard() else placement
            for axis, placement in zip(names, tensor._spec.cotangent().placements, strict=True)
        ]
        local = tensor.to_local(grad_placements=average)
        if spec is None:
            return local
        return DTensor.from_local(local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)

    def _hide(self) -> None:
        hidden, self._hidden = self._hidden, []
        changed: dict[int, DTensor] = {}
        for each, tensor, local, written in hidden:
            owner = each.owner()
            if owner is None:
                continue
            tensors = _tensors(owner, each.name)
            now = tensors.get(each.name)
            if isinstance(now, Tensor) and now is not local and not isinstance(now, DTensor):
                # The call assigned a plain tensor to the buffer.
                tensor = DTensor.from_local(now.detach(), tensor.device_mesh, tensor.placements)
                written = ()
            tensors[each.name] = tensor
            # Batch norms in training write buffers without increasing their version.
            if written is not None and (owner.training or writes_to(tensor._local_shard) != written):
                changed[id(tensor)] = tensor
        if changed and self.broadcast_buffers:
            _take_from_first([*changed.values()], self.data)


def _tensors(owner: nn.Module, name: str) -> dict[str, Any]:
    """Return the dict of a module that holds the tensor of this name: its parameters or its buffers."""
    return parameters_of(owner) if name in parameters_of(owner) else buffers_of(owner)


def _take_from_first(buffers: list[DTensor], data: MeshInfo) -> None:
    """Copy buffers from the first rank of the mesh, by one broadcast for each dtype.

    They get new memory, since the forward pass may have saved the old one for backward.
    """
    by_dtype: dict[torch.dtype, list[DTensor]] = {}
    for buffer in buffers:
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for same in by_dtype.values():
            local = [buffer._local_shard for buffer in same]
            received = torch.cat([tensor.reshape(-1) for tensor in local])
            for name in _groups(data):
                received = wait(broadcast(received, 0, name))
            pieces = received.split([tensor.numel() for tensor in local])
            for buffer, tensor, piece in zip(same, local, pieces, strict=True):
                buffer._local_shard = piece.view_as(tensor).clone()


def _groups(data: MeshInfo) -> list[str]:
    """Return the group of all axes, or, where it was not created, those of the axes: one broadcast after the other."""
    axes = tuple(range(len(data.sizes)))
    return [data.groups[axes]] if axes in data.groups else [data.groups[axis,] for axis in axes]


def _before(module: nn.Module, args: object, kwargs: object) -> None:
    module.__dict__[_VIEW].enter(module, (args, kwargs))


def _after(module: nn.Module, args: object, output: object) -> None:
    module.__dict__[_VIEW].leave(module)
