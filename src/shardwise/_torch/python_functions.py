"""PyTorch's Python functions that create plain tensors in between, and how to wrap one."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._jit_internal import boolean_dispatched

Function = Callable[..., object]


class Place(NamedTuple):
    """An attribute of a module or class that holds a function. Several may hold the same one."""

    owner: object
    name: str


def functions_that_make_tensors() -> list[Place]:
    """Return the places of PyTorch's Python functions that make tensors from sizes and numbers alone.

    Examples are an initial state of zeros, a count of elements, offsets of bags, a causal mask to compare with.
    """
    from torch import _lowrank
    from torch.masked import _ops as masked
    from torch.nn.modules import transformer

    recurrent = (nn.RNN, nn.GRU, nn.LSTM, nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    pools = ("fractional_max_pool2d", "fractional_max_pool3d")
    return [
        Place(_lowrank, "get_approximate_basis"),
        Place(masked, "mean"),
        Place(torch.masked, "mean"),
        Place(masked, "_std_var"),
        Place(torch.functional, "_unravel_index"),
        Place(F, "embedding_bag"),
        Place(F, "multi_head_attention_forward"),
        Place(transformer, "_detect_is_causal_mask"),
        *(Place(F, name) for name in pools),
        *(Place(F, f"{name}_with_indices") for name in pools),
        *(Place(module, "forward") for module in recurrent),
    ]


def holders(function: Function) -> list[Place]:
    """Return all module variables that hold a function, also in programs that imported it by name.

    Relies on nothing private: it searches the modules that are loaded.
    """
    return [
        Place(module, name)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType)
        for name, value in list(vars(module).items())
        if value is function
    ]


def disguised(wrapper: Function, original: Function) -> Function:
    """Return the wrapper with the name, signature and, for `torch.jit.script`, source and globals of the original.

    The script compiler reads the source of the function that was wrapped, and looks up names in the globals and the
    closure of the wrapper. It finds functions with two signatures in a table.
    """
    code, closure = wrapper.__code__, wrapper.__closure__
    made = types.FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    if original in boolean_dispatched:
        boolean_dispatched[made] = boolean_dispatched[original]
    return functools.wraps(original)(made)
