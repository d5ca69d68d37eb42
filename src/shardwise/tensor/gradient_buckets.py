"""Gradient buckets: gradients of leaves are reduced together during the backward pass.

A gradient that needs a reduction waits in a bucket. A full bucket is sent at once, by one collective that runs while
the pass continues; the others are sent when the pass ends, which waits for all of them. Until then `.grad` is a tensor
whose data comes from its bucket: a hook that reads it sends the bucket and waits.

What is in a bucket depends on the order of gradients and on specs alone, so that all ranks send the same.
"""

from __future__ import annotations

import re
import threading
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from .._torch.autograd import call_after_backward
from .._torch.autograd_graph import accumulated_leaf
from .._torch.backward_pass import current_node, current_pass
from .._torch.tls import ThreadValue
from .._torch.wrapper import make_wrapper
from ..comm.buckets import Bucket, Channel, Reduction, reduction_between
from ..errors import InputError
from ..sharding.base import DTensorBase, LocalSource
from ..sharding.recording import is_recording
from ..sharding.spec import DTensorSpec
from ..world import RankTensor
from .autograd import to_spec
from .sources import set_local

DEFAULT_SIZE = 25 << 20
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REAL = (Tensor, RankTensor)
_size = ThreadValue("bucket_gradients", DEFAULT_SIZE)


class bucket_gradients:
    """Reduce the gradients of a backward pass in buckets of this size; with 0 or None, each when it arrives.

    The size is a number of bytes or a text; the default is 25 MiB, also without a call. A bucket is sent as soon as it
    holds that much, and a larger gradient is sent alone. Like `torch.set_grad_enabled`, it acts on this thread, from
    the call on, or as a context manager inside the block.

    >>> bucket_gradients("100 MiB")
    >>> with bucket_gradients(None):
    ...     loss.backward()
    """

    def __init__(self, size: int | str | None = DEFAULT_SIZE) -> None:
        self._before = _size.get()
        _size.set(bytes_of(size))

    def __enter__(self) -> None:
        """Do nothing: the size is set by the constructor."""

    def __exit__(self, *_: object) -> None:
        _size.set(self._before)


def bucket_size() -> int:
    """Return the bytes of a bucket in this thread; 0 if gradients are reduced one by one."""
    return _size.get()


def bytes_of(size: int | str | None, asked_by: str = "bucket_gradients") -> int:
    """Return a size in bytes, given as a number, a text such as `"25 MiB"`, or None for 0."""
    if isinstance(size, str):
        parsed = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]i?B|B)\s*", size)
        if parsed is None:
            raise InputError(
                f"{asked_by} got the size {size!r}", 'write a number and a unit: "25 MiB", "500 KB", "2 GiB"'
            )
        return int(float(parsed[1]) * _UNITS[parsed[2]])
    if size is not None and size < 0:
        raise InputError(f"{asked_by} got the size {size}", "give a number of bytes that is not negative, or None")
    return size or 0


# ---- gradients that wait for their data ------------------------------------------------------------------------------


class Collected(LocalSource):
    """The source of a gradient that is in a bucket: its data is the result of the bucket's collective.

    Autograd can make the gradient of a leaf its `.grad`, or add it to one, without the data. Other ops wait for it.
    """

    __slots__ = ("_bucket", "_index", "_local", "_tensors")

    def __init__(self, bucket: Bucket, index: int) -> None:
        self._bucket, self._index = bucket, index
        self._local: Tensor | None = None
        # First the gradient, then its `.grad`. Weak: autograd copies a gradient to which there are other references.
        self._tensors: list[ref[DTensorBase]] = []

    def new_tensor(self, spec: DTensorSpec, device: torch.device) -> DTensorBase:
        """Return a new tensor with this source."""
        shape, stride, dtype = spec.tensor_meta
        tensor: DTensorBase = make_wrapper(
            DTensorBase.concrete, shape, stride, None, None, dtype, torch.strided, device
        )
        tensor._spec, tensor._source = spec, self
        self._tensors.append(ref(tensor))
        return tensor

    def complete(self) -> None:
        """Send the bucket unless it was sent, wait for it, and set the data of its tensors."""
        with self._bucket.lock:
            if self._local is None:
                self._local = self._bucket.results()[self._index]
            for reference in self._tensors:
                if (tensor := reference()) is not None:
                    set_local(tensor, self._local)
            self._tensors.clear()

    def local(self, tensor: DTensorBase) -> Tensor:
        """Return the reduced gradient."""
        self.complete()
        assert self._local is not None
        set_local(tensor, self._local)
        return self._local

    def write_back(self, tensor: DTensorBase) -> None:
        """Do nothing: reading the shard to write it removed the source."""

    def accumulate(self, gradient: DTensorBase, grad: DTensorBase | None) -> DTensorBase | None:
        """Return the `.grad` of a leaf: a new tensor with this source, or `grad`, to which the sum is added later."""
        if not self._tensors or self._tensors[0]() is not gradient:
            return None  # `gradient` is a `.grad`, which the program may write
        if grad is None:
            return self.new_tensor(gradient._spec, gradient.device)
        return grad if _add_later(grad, gradient) else None


class AddedLater(LocalSource):
    """The source of a `.grad` of earlier passes to which a gradient in a bucket is to be added."""

    __slots__ = ("_gradient", "_local", "_lock")

    def __init__(self, local: Tensor, gradient: DTensorBase) -> None:
        self._local, self._gradient = local, gradient
        self._lock = threading.RLock()

    def local(self, tensor: DTensorBase) -> Tensor:
        """Return the sum, in the memory of the earlier gradient."""
        with self._lock:
            if tensor._source is self:  # no other thread was quicker
                with torch.no_grad():
                    tensor.wrap(self._local, tensor._spec).add_(self._gradient)
                set_local(tensor, self._local)
        return tensor._local_shard

    def write_back(self, tensor: DTensorBase) -> None:
        """Do nothing: reading the shard to write it removed the source."""


def _add_later(grad: DTensorBase, gradient: DTensorBase) -> bool:
    """Arrange that a collected gradient is added to the `.grad` of a leaf when its pass ends; False if impossible."""
    leaf = accumulated_leaf(current_node())
    buckets = _passes.get(current_pass())
    if leaf is None or leaf.grad is not grad or buckets is None:
        return False
    local = grad._local_shard
    if grad._source is not None or grad._spec.layout is not gradient._spec.layout or grad.dtype != gradient.dtype:
        return False
    grad._source = AddedLater(local, gradient)
    del grad._shard
    buckets.sums.append(grad)
    return True


# ---- the buckets of a pass -------------------------------------------------------------------------------------------


class GradientBuckets:
    """The gradients that one backward pass collects. Only the pass holds this object, so it ends with a failed pass."""

    __slots__ = ("__weakref__", "_collected", "_open", "sums")

    def __init__(self) -> None:
        self._open: dict[tuple[Channel, torch.device], Bucket] = {}
        self._collected: list[Collected] = []
        self.sums: list[DTensorBase] = []
        """The `.grad` tensors of earlier passes to which gradients are added at the end of this one."""

    def collect(self, grad: DTensorBase, target: DTensorSpec, reduction: Reduction, size: int) -> DTensorBase:
        """Return the gradient with the target's placements. Its data is set at the end of the pass, or when read."""
        device = grad.device
        source = Collected(*self._put(reduction, grad._local_shard, device, size))
        self._collected.append(source)
        return source.new_tensor(target, device)

    def _put(self, reduction: Reduction, local: Tensor, device: torch.device, size: int) -> tuple[Bucket, int]:
        """Put a gradient into a bucket, which is sent if it is full then. Return the bucket and the index in it."""
        if reduction.nbytes >= size:  # alone, so that it is not copied
            bucket, index = Bucket(), None
        else:
            key = reduction.channel, device
            bucket = self._open.get(key) or self._open.setdefault(key, Bucket())
            index = bucket.add(reduction, local)
            if index is None:  # it was sent: it was full, or a gradient in it was read
                bucket = self._open[key] = Bucket()
        if index is None:
            index = bucket.add(reduction, local)
            assert index is not None
        if bucket.nbytes >= size:
            bucket.start()
        return bucket, index

    def finish(self) -> None:
        """Send the remaining buckets, and wait for all."""
        for bucket in self._open.values():
            bucket.start()
        for source in self._collected:
            source.complete()
        for grad in self.sums:
            _ = grad._local_shard
        self._collected.clear()
        self.sums.clear()


_passes: WeakValueDictionary[int, GradientBuckets] = WeakValueDictionary()


def reduced(grad: DTensorBase, target: DTensorSpec, size: int | None = None) -> DTensorBase:
    """Return the gradient of a leaf with the target's placements, reduced now or in a bucket with others.

    `size` overrides the size of `bucket_gradients`. The gradient is reduced now if it gets a graph of its own, which
    records calls in their order, and in recordings: tracers see no end of a pass, and an erased step joins its
    reductions itself.
    """
    size = _size.get() if size is None else size
    if size and not torch.is_grad_enabled() and type(grad._local_shard) in _REAL and not is_recording():
        reduction = reduction_between(grad._spec, target)
        if reduction is not None:
            return _buckets().collect(grad, target, reduction, size)
    found: DTensorBase = to_spec(grad, target)
    return found


def _buckets() -> GradientBuckets:
    """Return the buckets of the backward pass that runs in this thread."""
    number = current_pass()
    found = _passes.get(number)
    if found is None:
        found = _passes[number] = GradientBuckets()
        call_after_backward(found.finish)
    return found
