"""The fastest callable for each op of a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from .._torch.bindings import binding, types_key
from .._torch.ops import builtin_of
from ..ops.recorded import STARTS
from .effects import is_op
from .recorder import Meta


def bindings_of(graph: fx.Graph) -> dict[fx.Node, Callable[..., object]]:
    """Return the fastest callable for each op, found with sample arguments. Starts of collectives are left out."""
    known: dict[object, Callable[..., object]] = {}
    found = {}
    for node in graph.nodes:
        if not is_op(node) or node.target in STARTS:
            continue
        try:
            args = tuple(map(_samples, node.args))
            kwargs = {name: _samples(value) for name, value in node.kwargs.items()}
            key = (node.target, types_key(args, kwargs))
            if key not in known:
                known[key] = binding(node.target, args, kwargs)
        except _Unknown:
            found[node] = builtin_of(node.target)
            continue
        found[node] = known[key]
    return found


class _Unknown(Exception):
    """Raised for an argument without a sample: its sizes differ between ranks, or it is not a tensor."""


def _samples(value: object) -> object:
    """Return arguments with meta tensors in the place of nodes."""
    if isinstance(value, fx.Node):
        meta = value.meta.get("tensor")
        if not isinstance(meta, Meta) or not all(isinstance(size, int) for size in (*meta.shape, *meta.stride)):
            raise _Unknown
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _samples(element) for name, element in value.items()}
    return type(value)(map(_samples, value)) if isinstance(value, (list, tuple)) else value
