"""Reduce the gradients of a group: one reduce-scatter from the gradients themselves into a flat buffer.

The pieces of that buffer become the `.grad` of the sharded parameters. With an axis that replicates, the flat buffer is
then summed over that axis, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch.tools import shown_in_profile
from ..tensor.dtensor import DTensor
from .buffers import Buffers
from .group import ParameterGroup
from .parameter import ShardedParameter
from .ranks import on_each_rank
from .transfer import Wait, all_reduce, reduce_scatter

Chosen = tuple[int, ...]


@dataclass
class ReduceSettings:
    """How the gradients of a group are reduced."""

    mean: bool = True
    """Whether gradients are averaged, for local inputs of each rank. For distributed inputs they are summed."""
    divide_factor: float | None = None
    """The divisor of the sum, if not the number of ranks."""
    force_sum: bool = False
    """Whether collectives only sum, and the division is a separate op."""
    over_replicas: bool = True
    """Whether gradients are reduced over the axis that replicates, too. If not, a later pass does it."""
    unused_as_zeros: bool = False
    """Whether zeros are reduced for parameters without a gradient."""
    hook: Callable[[Tensor], None] | None = None
    """Called with each flat buffer of reduced gradients."""


class Reduction:
    """A reduction in flight: first over the axis that shards, then over the one that replicates."""

    def __init__(self, group: ParameterGroup, settings: ReduceSettings) -> None:
        self.group = group
        self._settings = settings
        self._flats: list[tuple[Buffers, Chosen, Tensor]] = []
        self._waits: list[Wait] = []
        self._scattered = False
        self.finished = False
        self._over_replicas = group.axes.replicates and settings.over_replicas
        self._averages = settings.mean and settings.divide_factor is None and not settings.force_sum
        for buffers in group.buffers:
            if settings.unused_as_zeros:
                for parameter in buffers.parameters:
                    parameter.add_missing_gradient()
            chosen = tuple(i for i, p in enumerate(buffers.parameters) if p.has_gradient())
            if chosen:
                self._start(buffers, chosen)

    def _start(self, buffers: Buffers, chosen: Chosen) -> None:
        parameters = [buffers.parameters[i] for i in chosen]
        gradients = [parameter.take_gradient() for parameter in parameters]
        dtype = self.group.mp_policy.reduce_dtype or gradients[0].dtype
        dims = [parameter.dim for parameter in parameters]

        def to_send(rank: int | None, gradients: Sequence[Tensor]) -> list[Tensor]:
            return [_to_send(g, dim, dtype, buffers.ranks) for g, dim in zip(gradients, dims, strict=True)]

        inputs = on_each_rank(to_send, gradients)
        flat = buffers.new_flat(dtype, buffers.device, chosen)
        outputs = buffers.pieces_of(flat, chosen)
        with shown_in_profile("shardwise::reduce gradients of {}", self.group.name):
            self._waits.append(reduce_scatter(outputs, inputs, self._averages, self.group.axes.shard_group))
        self._flats.append((buffers, chosen, flat))

    def advance(self) -> None:
        """Wait for the collective in flight, and start the next one or set the gradients."""
        if not self._scattered:
            self._scattered = True
            self._after_scatter()
            if self._over_replicas:
                return
        self._finish()
        self.finished = True

    def _after_scatter(self) -> None:
        """Add the gradients of earlier passes, and start to reduce over the axis that replicates."""
        self._wait()
        if not self.group.axes.replicates:
            return
        for buffers, chosen, flat in self._flats:
            for i, shard in zip(chosen, buffers.shards_of(flat, chosen), strict=True):
                earlier = buffers.unreduced.pop(i, None)
                if earlier is not None:
                    shard.add_(earlier)
                if not self._over_replicas:
                    buffers.unreduced[i] = shard
            if self._over_replicas:
                with shown_in_profile("shardwise::reduce gradients of {} over replicas", self.group.name):
                    self._waits.append(all_reduce(flat, self._averages, self.group.axes.replicate_group))
        if not self._over_replicas:
            self._flats = []

    def _finish(self) -> None:
        """Wait for all collectives, and set the gradients of the sharded parameters."""
        self._wait()
        for buffers, chosen, flat in self._flats:
            divisor = self._divisor()
            if divisor != 1:
                flat.div_(divisor)
            if self._settings.hook is not None:
                self._settings.hook(flat)
            final = flat.to(device=buffers.shard_device(), dtype=buffers.dtype)
            for i, shard in zip(chosen, buffers.shards_of(final, chosen), strict=True):
                _add_gradient(buffers.parameters[i], shard)
        self._flats = []

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = []

    def _divisor(self) -> float:
        """Return the number by which the results of the collectives must still be divided."""
        settings = self._settings
        if settings.divide_factor is not None:
            return settings.divide_factor
        if not settings.mean or self._averages:
            return 1
        sizes = self.group.axes.mesh_info.sizes
        return sizes[0] * sizes[1] if self.group.axes.replicates else sizes[0]


def _to_send(gradient: Tensor, dim: int, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return a gradient as a vector with the same number of rows for each rank, padded if sizes are uneven."""
    rows = gradient.movedim(dim, 0) if dim else gradient
    missing = -rows.shape[0] % ranks
    if not missing:
        return rows.to(dtype).reshape(-1)
    padded = rows.new_empty((rows.shape[0] + missing, *rows.shape[1:]), dtype=dtype)
    padded[: rows.shape[0]].copy_(rows)
    padded[rows.shape[0] :].zero_()
    return padded.view(-1)


def _add_gradient(parameter: ShardedParameter, shard: Tensor) -> None:
    sharded = parameter.sharded
    new = DTensor.wrap(shard, parameter.spec)
    if sharded.grad is None:
        sharded.grad = new
    else:
        sharded.grad += new
