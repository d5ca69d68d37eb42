"""The collectives of a group of parameters: one call each, into preallocated memory.

gloo implements a reduce-scatter by an all-reduce. There it is replaced by one all-to-all of the gradients, packed by
one kernel, and a local sum: half of the bytes. Other backends reduce directly from the gradients. A group of one rank
copies its inputs without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.collectives import group_named

Wait = Callable[[], None]


def all_gather(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: str) -> Wait:
    """Start to gather each input into its output. Return a function that waits for that."""
    if len({tensor.dtype for tensor in inputs}) > 1:  # as bytes, so that dtypes share one call
        inputs = [tensor.view(torch.uint8) for tensor in inputs]
        outputs = [tensor.view(torch.uint8) for tensor in outputs]
    process_group = _group(group)
    if process_group.size() == 1:
        return _copied(outputs, inputs)
    return _waiting(process_group.allgather_into_tensor_coalesced(list(outputs), list(inputs)), outputs, inputs)


def reduce_scatter(outputs: Sequence[Tensor], inputs: Sequence[Tensor], mean: bool, group: str) -> Wait:
    """Start to sum or average each input over the ranks, with this rank's shard of the result in its output.

    Return a function that waits for that.
    """
    process_group = _group(group)
    if process_group.size() == 1:
        return _copied(outputs, inputs)
    if inputs[0].device.type == "cpu" and _runs_on_gloo(process_group, inputs[0]):
        return _reduce_by_exchange(outputs, inputs, mean, process_group)
    options: Any = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    work = process_group.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), options)
    return _waiting(work, outputs, inputs)


def all_reduce(tensor: Tensor, mean: bool, group: str) -> Wait:
    """Start to sum or average a tensor over the ranks, in place. Return a function that waits for that."""
    process_group = _group(group)
    if process_group.size() == 1:
        return _nothing
    averages = mean and not _runs_on_gloo(process_group, tensor)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work = process_group.allreduce([tensor], options)

    def wait() -> None:
        work.wait()
        if mean and not averages:
            tensor.div_(process_group.size())

    return wait


def _group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name. Its methods call ops of `torch.ops.c10d`, which simulated ranks run, too."""
    return group_named(name)


def _copied(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Wait:
    for output, sent in zip(outputs, inputs, strict=True):
        output.copy_(sent.view(output.shape))
    return _nothing


def _nothing() -> None:
    """Return at once: nothing is in flight."""


def _waiting(work: dist.Work, *tensors: Sequence[Tensor]) -> Wait:
    """Return a function that waits for communication, and holds its tensors until then."""

    def wait() -> None:
        work.wait()
        kept.clear()

    kept = list(tensors)
    return wait


def _runs_on_gloo(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Return whether gloo runs the collectives of a group on tensors of this device."""
    return f"{tensor.device.type}:gloo" in dist.get_backend_config(group)


def _reduce_by_exchange(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], mean: bool, group: dist.ProcessGroup
) -> Wait:
    """Reduce-scatter by one all-to-all and a local sum."""
    ranks = group.size()
    sent = torch.cat([tensor.view(ranks, -1) for tensor in inputs], dim=1)
    received = torch.empty_like(sent)
    work = group.alltoall_base(received, sent, [], [])

    def wait() -> None:
        work.wait()
        combine = torch.mean if mean else torch.sum
        flat = _as_one(outputs)
        if flat is not None:
            combine(received, 0, out=flat)
            return
        parts = received.split([output.numel() for output in outputs], dim=1)
        for output, part in zip(outputs, parts, strict=True):
            combine(part, 0, out=output)

    return wait


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over the memory of all of these, if they are adjacent; else None."""
    first = tensors[0]
    end = first.storage_offset()
    for tensor in tensors:
        if tensor.storage_offset() != end or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())
