"""How a write to a view reaches what it views: for each view op, the op that replaces that part.

>>> put = replacing(torch.ops.aten.slice.Tensor, (x, 0, 2, 4), {}, None)
>>> put(x, new_rows)          # x with its rows 2 and 3 replaced
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.ops import OpOverload
from ..notation.schema import overload_key
from .op import Put
from .registry import amend, resolve

aten = torch.ops.aten
Write = Callable[[Tensor, Tensor], Any]
"""From a tensor and the new value of a view of it to the new value of the tensor."""


def replacing(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None) -> Write | None:
    """The replacement for the view `func(*args, **kwargs)`, or its index-th result; None for ops not listed here."""
    op = resolve(func)
    return None if op.put is None else op.put({**op.arguments(args, kwargs), "index-th": index})


def _same(given: dict[str, Any]) -> Write:
    return lambda root, value: value


def _reshaped(given: dict[str, Any]) -> Write:
    return lambda root, value: aten.view.default(value, list(root.shape)) if value.numel() else root


def _permuted(given: dict[str, Any]) -> Write:
    dims = given["dims"]
    order = [dim % len(dims) for dim in dims]
    return lambda root, value: aten.permute.default(value, [order.index(dim) for dim in range(len(order))])


def _transposed(given: dict[str, Any]) -> Write:
    return lambda root, value: aten.transpose.int(value, given["dim0"], given["dim1"])


def _turned(given: dict[str, Any]) -> Write:
    return lambda root, value: aten.t.default(value)


def _sliced(given: dict[str, Any]) -> Write:
    dim, start, end, step = (given[name] for name in ("dim", "start", "end", "step"))
    return lambda root, value: aten.slice_scatter.default(root, value, dim, start, end, step)


def _selected(given: dict[str, Any]) -> Write:
    index = given["index"] if given["index-th"] is None else given["index-th"]
    return lambda root, value: aten.select_scatter.default(root, value, given["dim"], index)


def _split(given: dict[str, Any]) -> Write:
    index, dim = given["index-th"], given["dim"]
    if "split_sizes" in given:
        starts = list(itertools.accumulate(given["split_sizes"], initial=0))
        start, end = starts[index], starts[index + 1]
    else:
        start, end = index * given["split_size"], (index + 1) * given["split_size"]
    return lambda root, value: aten.slice_scatter.default(root, value, dim, start, end)


def _diagonal(given: dict[str, Any]) -> Write:
    where = [given[name] for name in ("offset", "dim1", "dim2")]
    return lambda root, value: aten.diagonal_scatter.default(root, value, *where)


def _strided(given: dict[str, Any]) -> Write:
    where = [given[name] for name in ("size", "stride", "storage_offset")]
    return lambda root, value: aten.as_strided_scatter.default(root, value, *where)


_PUTS: dict[OpOverload, Put] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.view.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: _turned,
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.unbind.int: _selected,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.diagonal.default: _diagonal,
    aten.as_strided.default: _strided,
}
for _view, _put in _PUTS.items():
    amend(overload_key(_view), put=_put)
