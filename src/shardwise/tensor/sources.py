"""Sources of local shards that are not available yet, or must be recomputed.

A tensor without a source holds its local shard in the slot `_shard`. With a source the slot is empty, and reading
`_local_shard` asks the source: `Pending` waits for a collective in flight, `Replayed` recomputes a view after its root
has changed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .._torch.wrapper import make_wrapper
from ..comm.redistribute import redistribute_local
from ..dispatch.gather_cache import assign
from ..dispatch.local_call import copied
from ..dispatch.view_call import ViewCall
from ..dispatch.writes import Counter, State, watch, writes_through, writes_to
from ..sharding.base import DTensorBase, LocalSource
from ..sharding.spec import DTensorSpec


def set_local(tensor: DTensorBase, local: Tensor) -> None:
    """Set the local shard of a tensor, and remove its source."""
    tensor._shard = local
    tensor.__dict__.pop("_source", None)


class Pending(LocalSource):
    """The last collective of a redistribution, still in flight. The first use of the tensor waits for it."""

    def __init__(self, tensor: DTensorBase, complete: Callable[[], Tensor]) -> None:
        # A finalizer waits for results that are never used: backends warn at exit of collectives not waited for.
        self.complete = weakref.finalize(tensor, complete)
        self._lock = threading.RLock()

    def local(self, tensor: DTensorBase) -> Tensor:
        """Wait for the collective, and return its result."""
        with self._lock:
            if tensor._source is self:  # no other thread was quicker
                found = self.complete()
                assert found is not None, "the source is removed when the result is read"
                set_local(tensor, found)
        return tensor._local_shard

    def write_back(self, tensor: DTensorBase) -> None:
        """Do nothing: reading the shard to write it removed the source."""


def pending(complete: Callable[[], Tensor], device: torch.device, spec: DTensorSpec) -> DTensorBase:
    """Return a tensor whose local shard is `complete()`, called on first use."""
    shape, stride, dtype = spec.tensor_meta
    tensor: DTensorBase = make_wrapper(DTensorBase.concrete, shape, stride, dtype=dtype, device=device)
    tensor._spec = spec
    tensor._source = Pending(tensor, complete)
    return tensor


class Replayed(LocalSource):
    """A view that shares no memory with the local shard of its root, such as a slice of a sharded dim.

    Reading it after its root has changed recomputes it from the root; writing it writes the root. All writes to the
    root's local shard are counted: those to the root, to other views of it, to `x.data`, and to the shard itself. An
    alias of the view shares its source.
    """

    def __init__(self, view: ViewCall, local: Tensor) -> None:
        self.view, self.cached = view, local
        self.counters: list[Counter] = []
        watch(self)
        self.seen = self._writes()

    def local(self, tensor: DTensorBase) -> Tensor:
        """Return the local shard, recomputed if the root was written since."""
        if self.seen is None or self.seen != self._writes():
            fresh = self.view.of(self.view.root)
            source = fresh._source
            # The shard of this new view is up to date. Its source must not be asked: for inference tensors, whose
            # writes are not counted, it would recompute the view forever.
            local = source.cached if isinstance(source, Replayed) else fresh._local_shard
            self.cached = redistribute_local(local, fresh._spec, tensor._spec)
            self.seen = self._writes()
        return self.cached

    def write_back(self, tensor: DTensorBase) -> None:
        """Write the view's value to its root, and from there to the root's own root."""
        root = self.view.root
        if isinstance(root._source, Replayed):
            # The view may share memory with the root's shard, which is recomputed below.
            self.cached = copied(self.cached, tensor._spec)
        expanded = [
            dim for dim, (n, step) in enumerate(zip(root.shape, root.stride(), strict=True)) if n > 1 and not step
        ]
        if expanded and root.dtype == tensor.dtype:
            written = self._put_into_expanded(tensor, expanded)
        else:
            written = self.view.put(root, type(tensor).wrap(self.cached, tensor._spec))
            if written is None:
                written = self._put_into_gathered(tensor)
        target = root._spec.with_meta(written._spec.tensor_meta)
        assign(root, redistribute_local(written._local_shard, written._spec, target))
        if root._source is not None:
            root._source.write_back(root)
        self.seen = self._writes()

    def replays(self) -> ViewCall:
        """Return the view call."""
        return self.view

    def _put_into_gathered(self, tensor: DTensorBase) -> DTensorBase:
        """Return the gathered root, with the view's value written into it."""
        gathered = self.view.root._spec.replicated(row_major=True)
        root_value = self._gathered_root()
        _write(self.view.of(root_value), self._gathered_value(tensor))
        return type(tensor).wrap(root_value, gathered)

    def _put_into_expanded(self, tensor: DTensorBase, expanded: list[int]) -> DTensorBase:
        """Return the gathered root, with the view's value written into it, if it is expanded along some dims.

        A write to one index of these dims is a write to all.
        """
        value = self._gathered_root()
        written = torch.zeros_like(value, dtype=torch.bool)
        _write(self.view.of(value), self._gathered_value(tensor))
        self.view.of(written).fill_(True)
        for dim in expanded:
            value = value.gather(dim, written.byte().argmax(dim, keepdim=True))
            written = written.any(dim, keepdim=True)
        repeated = value.expand(self.view.root.shape).contiguous()
        return type(tensor).wrap(repeated, self.view.root._spec.replicated(row_major=True))

    def _gathered_root(self) -> Tensor:
        """Return a copy of the gathered root, with memory for each element."""
        root = self.view.root
        value = redistribute_local(root._local_shard, root._spec, root._spec.replicated(row_major=True))
        return value.clone(memory_format=torch.contiguous_format)

    def _gathered_value(self, tensor: DTensorBase) -> Tensor:
        return redistribute_local(self.cached, tensor._spec, tensor._spec.replicated(row_major=True))

    def _writes(self) -> State:
        """Return how often the local shard of the outermost root was written."""
        source = self.view.root._source
        if isinstance(source, Replayed):
            return source._writes()
        written = writes_to(self.shard())
        return None if written is None else (*written, writes_through(self.counters))

    def shard(self) -> Tensor:
        """Return the local shard of the outermost root."""
        root = self.view.root
        return root._source.shard() if isinstance(root._source, Replayed) else root._local_shard


def _write(view: Tensor, value: Tensor) -> None:
    """Write a value to a view; along an expanded dim, which has one element, write an element that was changed."""
    for dim, (n, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if n > 1 and not step:
            changed = (value != view).byte()
            value = value.gather(dim, changed.argmax(dim, keepdim=True))
            view = view.narrow(dim, 0, 1)
    view.copy_(value)


def replayed(view: ViewCall, local: Tensor, spec: DTensorSpec, offset: int) -> DTensorBase:
    """Return the tensor that a view call makes, with this local shard until its root changes."""
    tensor = DTensorBase.concrete.wrap(local, spec, offset)
    del tensor._shard
    tensor._source = Replayed(view, local)
    return tensor
