"""Staging: copies of the data of a background save, so that the state may change during the save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..sharding.base import DTensorBase
from .background import staging_buffer
from .state import FlatState, State
from .write import kept_object

Staging = Literal["buffer", "deferred", "snapshot"]

_SMALL = 1 << 16
"""A deferred save copies tensors of at most this many bytes at once, such as buffers that a forward pass changes."""


class Copies(NamedTuple):
    """Copies of tensors, rank by rank, that are complete when `wait` has returned."""

    tensors: list[list[Tensor]]
    wait: Callable[[], None]


def copied(tensors: list[list[Tensor]]) -> Copies:
    """Copy tensors into the staging buffer, which is pinned if some of them are on a GPU.

    Copies from a GPU are enqueued on the current stream of each device, so that kernels launched later on that stream
    may overwrite the tensors; the caller does not wait for them.
    """
    every = [tensor for row in tensors for tensor in row]
    devices = {tensor.device for tensor in every if tensor.device.type == "cuda"}
    buffer, end = staging_buffer(sum(map(_aligned, every)), pinned=bool(devices)), 0
    copies: list[list[Tensor]] = []
    for row in tensors:
        copies.append([])
        for tensor in row:
            place = buffer[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach(), non_blocking=tensor.device.type == "cuda")
            copies[-1].append(place)
            end += _aligned(tensor)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()
        every.clear()  # only now: freed earlier, the sources' memory could be reused by another stream

    return Copies(copies, wait)


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64


# ---- deferred staging ------------------------------------------------------------------------------------------------


class Deferred:
    """A state that is copied in the background, while the program continues without changing its tensors.

    Optimizers wait for the copy (`background.let_optimizers_wait`). Small tensors and objects, such as the running
    mean of a normalization, are copied at once. `check` notices other writes by the version counters of tensors.
    """

    def __init__(self, state: State, flat: FlatState) -> None:
        self.values = {name: _kept(value, state[str(flat.paths[name][0])]) for name, value in flat.values.items()}
        self._versions = _versions(self.values)
        devices = {value.device for value in self.values.values() if isinstance(value, Tensor)}
        self._ready = {
            device: torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"
        }

    def copied(self, tensors: list[list[Tensor]]) -> Copies:
        """Copy the tensors to write, which are views of the state, and wait for the copies."""
        streams = {device: torch.cuda.Stream(device) for device in self._ready}
        before = [torch.cuda.current_stream(device) for device in streams]
        try:
            for device, stream in streams.items():
                stream.wait_event(self._ready[device])
                torch.cuda.set_stream(stream)  # of this thread
            copies = copied(tensors)
            copies.wait()
        finally:
            for stream in before:
                torch.cuda.set_stream(stream)
        self.check()
        return copies

    def check(self) -> None:
        """Raise an error if a tensor was written since the save was started."""
        now = _versions(self.values)
        changed = [name for name, version in self._versions.items() if now[name] != version]
        if changed:
            raise CheckpointError(
                f"{', '.join(map(repr, changed[:4]))} changed before the state had been copied",
                'call `saving.staged()` before such a write, where `saving = async_save(..., staging="deferred")`, '
                'or pass staging="buffer"',
            )


def _kept(value: object, owner: object) -> object:
    """Return a copy of a value, or the value itself if it is a large tensor or a tensor of an optimizer."""
    if not isinstance(value, Tensor):
        return kept_object(value)
    if isinstance(owner, torch.optim.Optimizer) or value.numel() * value.dtype.itemsize > _SMALL:
        return value
    if isinstance(value, DTensorBase):  # cheaper than an op on a distributed tensor
        return type(value).concrete.wrap(value._local_shard.detach().clone(), value._spec)
    return value.detach().clone()


def _versions(values: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: _version(value) for name, value in values.items() if isinstance(value, Tensor)}


def _version(value: Tensor) -> tuple[int, ...]:
    tensors = (value, value._local_shard) if isinstance(value, DTensorBase) else (value,)
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)
