"""Where the gradient of a leaf is reduced: when it arrives, or once for several backward passes.

>>> for batch in batches[:-1]:
...     with accumulate_gradients():
...         loss_of(batch).backward()      # nothing is reduced: each rank adds up what it computed
>>> loss_of(batches[-1]).backward()        # the sums are reduced, once
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from .._torch.tls import ThreadValue
from ..sharding.layout import Layout
from ..sharding.spec import DTensorSpec

_accumulating = ThreadValue("accumulate_gradients", False)


@contextmanager
def accumulate_gradients(enabled: bool = True) -> Iterator[None]:
    """Inside, gradients stay sums in the making over the axes along which their parameter is whole.

    The first backward pass after it adds its own share and reduces the whole. Until then `.grad` is Partial on these
    axes. Along axes that cut a parameter its gradient is reduced and cut in each pass, so that it needs no more
    memory than the parameter. With `enabled=False` the context does nothing: `accumulate_gradients(not last)`.
    """
    before = _accumulating.get()
    _accumulating.set(enabled)
    try:
        yield
    finally:
        _accumulating.set(before)


class Home:
    """Where the gradients of a leaf are brought: the leaf's spec, and whether a sum waits for its reduction."""

    __slots__ = ("spec", "waits")

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec, self.waits = spec, False

    def target(self, grad: DTensorSpec) -> DTensorSpec:
        """The spec that a gradient is brought to when it arrives."""
        wanted = _of_dtype(self.spec.cotangent(), grad.dtype)
        if not (self.waits or _accumulating.get()) or not grad.layout.partial:
            return wanted
        leaf = _accumulated_leaf()
        if leaf is None:
            return wanted
        if not self.waits:
            self.waits = True
            _when_accumulated(leaf, self)
        return _with_sums_of(wanted, grad)


def _accumulated_leaf() -> Any:
    """The leaf whose `.grad` the gradient at hand will be added to; None where a caller asked for the gradient."""
    node: Any = torch._C._current_autograd_node()
    try:
        return node.variable if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad takes the gradient before it reaches the leaf
        return None


def _when_accumulated(leaf: Any, home: Home) -> None:
    """Reduce the leaf's `.grad` after the next backward pass outside of the context."""

    def reduce(leaf: Any) -> None:
        if _accumulating.get():
            return
        handle.remove()
        home.waits = False
        grad = leaf.grad
        if hasattr(grad, "_spec") and grad._spec.layout.partial:
            leaf.grad = grad._to_spec(_of_dtype(home.spec.cotangent(), grad.dtype))

    handle = leaf.register_post_accumulate_grad_hook(reduce)
    # It goes before the user's own hooks, which see a gradient with the leaf's placements. Autograd takes hooks in the
    # order in which they came into the dict.
    hooks = leaf._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


@lru_cache(maxsize=8192)
def _with_sums_of(wanted: DTensorSpec, grad: DTensorSpec) -> DTensorSpec:
    """The wanted spec, but Partial where the gradient is a sum and nothing is cut."""
    layout = wanted.layout
    cut = {axis for dim in layout.dims for factor in dim for axis in factor.axes}
    sums = tuple((axis, op) for axis, op in grad.layout.partial if axis not in cut and op in ("sum", "avg"))
    return DTensorSpec.from_layout(
        wanted.mesh_info, Layout.make(layout.mesh_sizes, layout.dims, sums), wanted.tensor_meta
    )


def _of_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    return spec if spec.dtype == dtype else spec.with_meta(spec.tensor_meta._replace(dtype=dtype))
