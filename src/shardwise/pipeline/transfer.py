"""Transfers between stages: activations forward, gradients backward, from each rank to its counterpart.

Stages have meshes of one shape. Each rank sends its local shard of a distributed tensor to the rank at the same
coordinate in the other stage, where the shards are the same tensor on the mesh of that stage.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import pytree
from .._torch.collectives import group_named
from ..errors import InputError
from ..ops.above_autograd import new_op
from ..sharding.cache import Cache
from ..sharding.mesh import DeviceMesh, mesh_info_of
from ..sharding.placement import Partial, Placement, Replicate
from ..tensor.dtensor import DTensor
from .schedule import Action

_LENGTH, _TEXT = 254, 255  # message indices, beyond those of tensors, for the metadata that the receiver needs first
_KNOWN_BYTES, _ENTRY_BYTES = 1 << 20, 1 << 10  # of the metadata that two stages have; an entry is about so large

__all__ = ["Courier", "Mailbox", "is_of_backward", "without_partial"]

T = TypeVar("T")


@dataclass(frozen=True)
class Described:
    """The metadata that the receiver of a local shard needs."""

    shape: tuple[int, ...]
    """The shape of the local tensor."""
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: tuple[Placement, ...] | None
    """The placements of a distributed tensor; None for a plain one."""
    global_shape: tuple[int, ...] = ()
    global_stride: tuple[int, ...] = ()

    def wrapped(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the tensor on the mesh of a stage with this metadata and local tensor."""
        if self.placements is not None:
            given = {"shape": self.global_shape, "stride": self.global_stride}
            local = DTensor.from_local(local, mesh, self.placements, **given)  # type: ignore[arg-type]
        return local.requires_grad_(self.requires_grad)


def described(tensor: Tensor) -> Described:
    """Return the metadata of a tensor."""
    if not isinstance(tensor, DTensor):
        return Described(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, None)
    local, spec = tensor._local_shard, tensor._spec
    sizes = tuple(local.shape), local.stride(), tensor.dtype, tensor.requires_grad
    return Described(*sizes, tensor.placements, tuple(spec.shape), tuple(spec.stride))


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor that is sent."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def without_partial(value: T) -> T:
    """Return a stage's outputs with Partial ones reduced, so that gradients have the placements of the outputs."""

    def reduced(tensor: DTensor) -> DTensor:
        if not any(isinstance(placement, Partial) for placement in tensor.placements):
            return tensor
        return tensor.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in tensor.placements])

    return pytree.tree_map_only(DTensor, reduced, value)


_send = new_op("send(Tensor local, str group, int tag) -> Tensor", lambda local, group, tag: local.clone())
_receive = new_op("receive(Tensor local, str group, int tag) -> ()", lambda local, group, tag: None)


class Mailbox:
    """Passes tensors from stage to stage in a simulated world, where one process runs all stages.

    Each tensor is passed through two ops, `shardwise::send` and `shardwise::receive`, so that modes that count
    communication see them.
    """

    def __init__(self, mesh_of: Callable[[int], DeviceMesh], mesh: DeviceMesh, axis: str) -> None:
        self.mesh_of = mesh_of
        self.held: dict[Action, object] = {}
        info = mesh_info_of(mesh)
        self.group = info.groups[info.axis_index(axis),]

    def send(self, to: Action, value: object, key: object, came_from: int = -1) -> None:
        """Store the input of another stage's action."""
        mesh, tag = self.mesh_of(to.stage), _tag(to, 0)

        def sent(tensor: Tensor) -> Tensor:
            return described(tensor).wrapped(_send(local_of(tensor), self.group, tag), mesh)

        self.held[to] = pytree.tree_map_only(Tensor, sent, value)

    def crosses(self, stage: int, other: int) -> bool:
        """Return whether two stages are on different meshes."""
        return self.mesh_of(stage) is not self.mesh_of(other)

    def receive(self, to: Action, key: object, came_from: int = -1) -> Any:
        """Return the input of an action; `came_from` is the distance to the stage that sent it."""
        found = self.held.pop(to)
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor):
                _receive(local_of(leaf), self.group, _tag(to, 0))
        return found

    def send_gradients(self, to: Action, gradients: Sequence[Tensor]) -> None:
        """Store the gradients of the tensors that a stage sent."""
        self.send(to, list(gradients), None)

    def receive_gradients(self, to: Action, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the tensors that a stage sent."""
        gradients: list[Tensor] = self.receive(to, None)
        return gradients

    def finish(self) -> None:
        """Do nothing: sends in one process are complete at once."""


class Courier:
    """Sends tensors from stage to stage between processes, and receives them.

    Sends are waited for at the end of a step. Metadata is sent once for each `key`, the shapes of a microbatch, and
    cached. Sender and receiver must evict the same entries: each pair of stages has a cache of its own, which both use
    with the same keys in the same order, and in which all entries count alike. With NCCL, forward and backward have
    separate process groups: in one group, operations run in order, and ranks would wait for each other in a circle.
    """

    def __init__(self, mesh_of: Callable[[int], DeviceMesh], mesh: DeviceMesh, axis: str) -> None:
        self.mesh_of = mesh_of
        info = mesh_info_of(mesh)
        lines = info.rank_groups((info.axis_index(axis),))
        self.line = next(ranks for ranks in lines if dist.get_rank() in ranks)
        # Not mesh.get_group(): equal meshes share a MeshInfo, with the groups of the first of them.
        forward = backward = group_named(info.groups[info.axis_index(axis),])
        if dist.get_backend(forward) == "nccl":
            made = [dist.new_group(ranks) for ranks in lines]
            backward = made[lines.index(self.line)]
        self.groups = {False: forward, True: backward}
        self.device = torch.device(mesh.device_type)
        self._known: dict[tuple[bool, int, int], Cache[object, object]] = {}
        self.under_way: list[tuple[Any, Tensor]] = []

    def send(self, to: Action, value: object, key: object, came_from: int = -1) -> None:
        """Start to send the input of another stage's action; `came_from` is the distance to this stage."""
        known = self._known_to_both(to, came_from)
        if known.get(key) is None:
            about = known[key] = pytree.tree_map_only(Tensor, described, value)
            # Not by send_object_list, which waits: two ranks that send to each other would wait forever.
            text = torch.frombuffer(bytearray(pickle.dumps(about)), dtype=torch.uint8).to(self.device)
            self._send_one(to, torch.tensor([text.numel()], device=self.device), _LENGTH)
            self._send_one(to, text, _TEXT)
        self._send(to, [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)])

    def crosses(self, stage: int, other: int) -> bool:
        """Return whether two stages are on different ranks."""
        return (stage - other) % len(self.line) != 0

    def receive(self, to: Action, key: object, came_from: int = -1) -> Any:
        """Receive the input of an action; `came_from` is the distance to the stage that sends it."""
        known = self._known_to_both(to, came_from)
        about = known.get(key)
        if about is None:
            length = torch.empty(1, dtype=torch.int64, device=self.device)
            self._receive_one(to, length, came_from, _LENGTH).wait()
            text = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
            self._receive_one(to, text, came_from, _TEXT).wait()
            about = known[key] = pickle.loads(text.cpu().numpy().tobytes())
        leaves = [leaf for leaf in pytree.tree_leaves(about) if isinstance(leaf, Described)]
        found = iter(self._receive(to, leaves, came_from))
        return pytree.tree_map_only(Described, lambda _: next(found), about)

    def send_gradients(self, to: Action, gradients: Sequence[Tensor]) -> None:
        """Start to send the gradients of the tensors that a stage sent."""
        self._send(to, gradients)

    def receive_gradients(self, to: Action, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Receive the gradients of the tensors that a stage sent."""
        return self._receive(to, [replace(described(output), requires_grad=False) for output in outputs], +1)

    def finish(self) -> None:
        """Wait for all sends."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()

    def _known_to_both(self, to: Action, came_from: int) -> Cache[object, object]:
        """Return the metadata that both stages have, by key."""
        place = to.backward, to.stage, came_from
        if place not in self._known:
            self._known[place] = Cache(_KNOWN_BYTES, lambda key, about: _ENTRY_BYTES)
        return self._known[place]

    def _send(self, to: Action, tensors: Sequence[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            local = local_of(tensor)
            if local.numel():
                self._send_one(to, local.contiguous(), index)

    def _send_one(self, to: Action, dense: Tensor, index: int) -> None:
        peer = self.line[to.stage % len(self.line)]
        work = dist.isend(dense, dst=peer, group=self.groups[to.backward], tag=_tag(to, index))
        self.under_way.append((work, dense))

    def _receive_one(self, to: Action, dense: Tensor, came_from: int, index: int) -> Any:
        peer = self.line[(to.stage + came_from) % len(self.line)]
        return dist.irecv(dense, src=peer, group=self.groups[to.backward], tag=_tag(to, index))

    def _receive(self, to: Action, about: Sequence[Described], came_from: int) -> list[Tensor]:
        mesh = self.mesh_of(to.stage)
        locals_ = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in about]
        works = [self._receive_one(to, dense, came_from, index) for index, dense in enumerate(locals_) if dense.numel()]
        for work in works:
            work.wait()
        strided = (
            dense if dense.stride() == each.stride else dense.new_empty_strided(each.shape, each.stride).copy_(dense)
            for dense, each in zip(locals_, about, strict=True)
        )
        return [each.wrapped(local, mesh) for each, local in zip(about, strided, strict=True)]


def is_of_backward(tag: int) -> bool:
    """Return whether a message with this tag carries gradients."""
    return bool(tag >> 18 & 1)


def _tag(to: Action, index: int) -> int:
    """Return a tag that is unique among the messages between two ranks."""
    if to.stage >= 1 << 10 or to.microbatch >= 1 << 12 or index > _TEXT:
        raise InputError(
            f"a pipeline cannot number the messages of {to!r} with {index + 1} tensors",
            f"use at most {1 << 10} stages, {1 << 12} microbatches and {_LENGTH} tensors between stages",
        )
    return ((to.microbatch * 2 + to.backward) << 18) | (to.stage << 8) | index
