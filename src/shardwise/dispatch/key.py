"""The key of a call: what its plan depends on.

The hot path builds it on every call, so it is short: the id of the op, then the key of each argument. That is its spec
for a distributed tensor, the value of an int, string or dtype, and the type of a float or generator. The floats 0,
infinity and NaN, by which a Partial sum may not be multiplied or divided, have keys of their own.

From it `plan_key` derives the key under which plans are shared, once for each new key:

- a number whose value no rule reads is replaced by its type, so that `x * 2` and `x * 3` share a plan;
- for the few ops whose rules do read numbers (the p of a norm), floats are represented by their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.symint import is_symbol
from ..ops.call import is_ordinary
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..world import values_of
from .arguments import Args, Kwargs

Key = tuple[object, ...]

BY_VALUE = frozenset((int, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format))
_UNHASHABLE = (torch.SymInt, torch.SymFloat, torch.SymBool, dict)


def argument_keys(kind: type[DTensorBase]) -> Callable[[object], object]:
    """Return the function that computes the key of an argument, for distributed tensors of this class."""

    def argument_key(value: Any) -> object:
        """Return the key of an argument. The schema fixes its type, except for numbers: 1, True and 1.0 must differ."""
        its = type(value)
        if its in BY_VALUE:
            return value
        if its is bool:
            return its, value
        if its is list or its is tuple:
            return list_key(value)
        if its is float:
            return its if value - value == 0.0 and value else (its, repr(value))
        if its is torch.Generator:
            return its
        if its is kind:
            return value._spec
        if isinstance(value, Tensor):
            if isinstance(value, DTensorBase):
                return its, value._spec
            # A number in a plain tensor is the same on all ranks.
            return (value.dtype, its) if not value.dim() else (value.dtype, its, value.shape)
        if its in _UNHASHABLE and not is_symbol(value):
            of_ranks = values_of(value)  # of a number that differs between simulated ranks
            return object() if of_ranks is None else (its, of_ranks)  # an object is equal to no other key
        return value

    def list_key(values: Any) -> object:
        first = type(values[0]) if values else None
        if first is int:
            return tuple(values)
        if first is float:
            total = sum(values)
            if total - total == 0.0:  # all are finite
                return tuple([type(value) if value else (type(value), 0) for value in values])
        return tuple([v._spec if type(v) is kind else argument_key(v) for v in values])

    return argument_key


def plan_key(op: ResolvedOp, key: Key, args: Args, kwargs: Kwargs) -> Key:
    """Return the key under which the plan of a call is shared, derived from the key of the call."""
    numbers = op.number_arguments
    if not numbers:
        return key
    changed = list(key)
    names = len(key) - len(kwargs)
    for where in (*range(len(args)), *kwargs):
        if where in numbers:
            at = 1 + where if isinstance(where, int) else names + list(kwargs).index(where)
            value = args[where] if isinstance(where, int) else kwargs[where]
            changed[at] = _by_value(value) if op.op.reads_numbers else _by_type(value, key[at])
    return tuple(changed)


def _by_value(value: object) -> object:
    return tuple(map(_by_value, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _by_type(value: object, key: Any) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_by_type, value, key))
    return type(value) if isinstance(value, (int, float, complex)) and is_ordinary(value) else key
