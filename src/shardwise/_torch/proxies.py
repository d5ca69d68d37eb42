"""Graphs that `make_fx` records: calls of Python functions as nodes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .modes import count_modes

__all__ = ["call_in_graph"]

D = TypeVar("D", bound=Tensor)
T = TypeVar("T")


def call_in_graph(function: Callable[[D], T], tensor: D) -> T:
    """Return `function(tensor)`, and record the call as one node of the graph that is recording that tensor.

    Return NotImplemented if there is no such graph. A graph of local tensors, as AOTAutograd records it, does not
    record the distributed tensors that wrap them. Relies on `get_proxy_slot`, `track_tensor_tree` and
    `disable_proxy_modes_tracing`. The function needs a `__name__` and a `__module__`.
    """
    if not count_modes():
        return NotImplemented
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return NotImplemented
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_slot, track_tensor_tree

    known = get_proxy_slot(tensor, mode.tracer, None)
    if known is None:
        return NotImplemented
    with disable_proxy_modes_tracing():
        result = function(tensor)
    proxy = mode.tracer.create_proxy("call_function", function, (known.proxy,), {})
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
