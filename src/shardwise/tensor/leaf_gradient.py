"""How the gradient of a leaf is reduced: when it arrives, or once for several backward passes.

>>> for batch in batches[:-1]:
...     with accumulate_gradients():
...         loss_of(batch).backward()      # nothing is reduced: each rank adds up what it computed
>>> loss_of(batches[-1]).backward()        # the sums are reduced, once
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch.autograd import accumulating_leaf, run_first
from .._torch.tls import ThreadValue
from ..sharding.base import DTensorBase
from ..sharding.layout import Layout
from ..sharding.memory_order import in_memory_order
from ..sharding.spec import DTensorSpec
from .autograd import as_distributed_gradient, to_spec
from .gradient_buckets import reduced

if TYPE_CHECKING:
    from .dtensor import DTensor

_accumulating = ThreadValue("accumulate_gradients", False)


@contextmanager
def accumulate_gradients(enabled: bool = True) -> Iterator[None]:
    """Defer the reduction of gradients over the axes along which their parameter is replicated.

    The first backward pass after the context adds its own gradient and reduces the sum. Until then `.grad` is Partial
    on these axes. Along axes that shard a parameter its gradient is reduced in each pass, so that it needs no more
    memory than the parameter. With `enabled=False` gradients are not deferred: `accumulate_gradients(not last)`.

    >>> for i, batch in enumerate(batches):
    ...     with accumulate_gradients(i < len(batches) - 1):
    ...         model(batch).sum().backward()
    """
    with _accumulating.changed_to(enabled):
        yield


def is_accumulating() -> bool:
    """Return whether this thread is inside `accumulate_gradients()`."""
    return _accumulating.get()


class LeafGradient:
    """How an incoming gradient of a leaf is reduced, and whether that is deferred."""

    __slots__ = ("bucket_size", "deferred", "earlier", "spec", "waits")

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec, self.deferred = spec, False
        self.waits = False
        """Whether reductions of this leaf are deferred as inside `accumulate_gradients()`."""
        self.bucket_size: int | None = None
        """The size of this leaf's buckets; None: that of `bucket_gradients`."""
        self.earlier: dict[torch.Size, DTensorSpec] = {}
        """For each other shape that the leaf has had, its last spec with that shape."""

    def change(self, spec: DTensorSpec) -> None:
        """Record that the leaf has another spec. Its shape may differ: `x.unsqueeze_(0)`, `x.data = y`."""
        if spec.shape != self.spec.shape:
            self.earlier[self.spec.shape] = self.spec
        self.spec = spec

    def of_shape(self, shape: torch.Size) -> DTensorSpec:
        """Return the spec of the leaf when it had this shape: gradients of ops recorded then have it."""
        return self.spec if shape == self.spec.shape else self.earlier.get(shape, self.spec)

    def hook(self, grad: Tensor | None) -> Tensor | None:
        """Return the gradient with the leaf's placements, or None if it has them; the tensor hook of the leaf."""
        if grad is None:
            return None
        if not isinstance(grad, DTensorBase):
            wanted = self.of_shape(grad.shape).cotangent()
            return to_spec(as_distributed_gradient(grad, wanted), wanted.with_dtype(grad.dtype))
        spec, wanted = grad._spec, self.spec.cotangent()
        if spec.tensor_meta.shape != wanted.tensor_meta.shape:
            wanted = self.of_shape(spec.shape).cotangent()
        if spec.layout is wanted.layout:
            return None
        # It keeps its strides: on one device, `torch.autograd.grad` returns the gradient of a sum expanded.
        target = wanted.with_meta(spec.tensor_meta)
        if (self.deferred or self.waits or _accumulating.get()) and spec.layout.partial:
            target = self._deferred_target(spec, target)
        return None if target.layout is spec.layout else reduced(grad, target, self.bucket_size)

    def _deferred_target(self, grad: DTensorSpec, wanted: DTensorSpec) -> DTensorSpec:
        """Return the spec in which gradients are added up before the reduction; `wanted` if this one is not added."""
        leaf = accumulating_leaf()
        if leaf is None:
            return wanted
        if not self.deferred:
            self.deferred = True
            _reduce_after_backward(leaf, self)
        return grad.derived(("partial sums of", wanted), lambda: _with_sums_of(wanted, grad))


class UnreducedGradient(LeafGradient):
    """The gradient of a leaf that is not reduced when it arrives, because the owner of the leaf does that later.

    `leaf.grad` has the spec of the leaf, but the local shards of a gradient with the spec `target`, which the owner
    reads. If it had the spec `target`, the ops by which autograd accumulates `.grad` might reduce it.
    """

    __slots__ = ("target",)

    def __init__(self, spec: DTensorSpec, target: DTensorSpec) -> None:
        super().__init__(spec)
        self.target = target

    def hook(self, grad: Tensor | None) -> Tensor | None:
        """Return the gradient with the local shards that the owner wants; the tensor hook of the leaf."""
        if grad is None:
            return None
        moved = to_spec(as_distributed_gradient(grad, self.spec), self.target.with_dtype(grad.dtype))
        # In the memory order of the leaf: otherwise autograd would copy it.
        local = in_memory_order(moved._local_shard, self.spec.memory_order)
        return DTensorBase.concrete.wrap(local, self.spec.with_dtype(grad.dtype))


def leaf_without_reduction(leaf: DTensor, target: DTensorSpec) -> DTensor:
    """Make a tensor a leaf whose gradient has the local shards of a gradient with the spec `target`.

    >>> leaf = leaf_without_reduction(DTensor.wrap(local, replicated), replicated.with_placements([Partial()]))
    """
    leaf._leaf_gradient = UnreducedGradient(leaf._spec, target)
    leaf.requires_grad_()
    leaf.register_hook(leaf._leaf_gradient.hook)
    return leaf


def reduce_gradient_of(leaf: DTensor) -> None:
    """Register the hook that reduces the gradient of a leaf to the leaf's own placements when it arrives."""
    if leaf._leaf_gradient is not None:  # it was frozen for a while, and has its hook
        leaf._leaf_gradient.change(leaf._spec)
        return
    # The hook lives on the leaf and must not keep it alive; a weak reference would keep modules from swapping it.
    leaf._leaf_gradient = LeafGradient(leaf._spec)
    leaf.register_hook(leaf._leaf_gradient.hook)


def _reduce_after_backward(leaf: Any, gradient: LeafGradient) -> None:
    """Reduce the leaf's `.grad` after the next backward pass outside of the context."""

    def reduce(leaf: Tensor) -> None:
        if gradient.waits or _accumulating.get():
            return
        handle.remove()
        gradient.deferred = False
        grad = leaf.grad
        if isinstance(grad, DTensorBase) and grad._spec.layout.partial:
            target = gradient.of_shape(grad.shape).cotangent().with_dtype(grad.dtype)
            leaf.grad = reduced(grad, target, gradient.bucket_size)

    handle = leaf.register_post_accumulate_grad_hook(reduce)
    run_first(leaf, handle)  # the user's own hooks see a gradient with the leaf's placements


def _with_sums_of(wanted: DTensorSpec, grad: DTensorSpec) -> DTensorSpec:
    """Return the wanted spec, but Partial over the axes on which the gradient is a sum and which do not shard it."""
    layout = wanted.layout
    sharding = {axis for dim in layout.dims for factor in dim for axis in factor.axes}
    sums = tuple((axis, op) for axis, op in grad.layout.partial if axis not in sharding and op in ("sum", "avg"))
    sizes = layout.mesh_sizes
    return DTensorSpec.from_layout(wanted.mesh_info, Layout.make(sizes, layout.dims, sums), wanted.tensor_meta)
