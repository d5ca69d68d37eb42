"""Reading by indices and masks, and scattering."""

from __future__ import annotations

import torch

from ..draw import Draw
from .table import expression


@expression(4)
def by_index(draw: Draw) -> str:
    """Elements or slices at indices."""
    x = draw.dims()
    dim = draw.dim(x)
    index = draw.index(draw.size(x, dim))
    first = draw.index(draw.size(x, 0))
    kinds = (
        f"{x}[{first}]",
        f"{x}[..., {draw.index(draw.size(x, -1))}]",
        f"{x}.index_select({dim}, {index}.flatten().abs())",
        f"{x}[{first}, {draw.index(max(draw.size(x, 1), 0) if draw.value(x).dim() > 1 else 0)}]",
        f"{x}.take({index}.abs())",
        f"{x}[[0, -1]]",
        f"torch.take_along_dim({x}, {x}.argsort({dim}, stable=True), {dim})",
        f"{x}.gather({dim}, {x}.argsort({dim}, stable=True))",
        f"{x}[:, {index}]",
        f"{x}[{index}.flatten(), 0]",
    )
    return draw.one(kinds)


@expression(3)
def by_mask(draw: Draw) -> str:
    """Elements where a condition holds."""
    x = draw.tensor()
    y = draw.broadcastable(x)
    kinds = (
        f"{x}[{x} > 0]",
        f"{x}.masked_select({y} > 0)",
        f"{x}.nonzero()",
        f"{x}.masked_fill({y} > 0, 2)",
        f"torch.where({y} > 0)[0]",
        f"{x}[{draw.tensor(lambda t: t.dtype is torch.bool)}]",
        f"torch.argwhere({x} > 0)",
        f"{x}.masked_scatter({y} > 0, {x} + 1)",
        f"{x}.where({y} > 0, {y})",
    )
    return draw.one(kinds)


@expression(3)
def scattered(draw: Draw) -> str:
    """Copies with values written at indices."""
    x = draw.dims()
    dim = draw.dim(x)
    index = draw.tensor(lambda t: t.dtype is torch.int64)
    order = f"{x}.argsort({dim}, stable=True)"
    flat = f"{index}.flatten().abs() % {max(draw.size(x, dim), 1)}"
    part = f"{x}.index_select({dim}, {flat})"
    kinds = (
        f"{x}.scatter({dim}, {order}, {x})",
        f"{x}.scatter_add({dim}, {order}, {x})",
        f"{x}.scatter({dim}, {order}, 2)",
        f"{x}.index_add({dim}, {flat}, {part})",
        f"{x}.index_fill({dim}, {flat}, 3)",
        f"torch.select_scatter({x}.clone(), {x}.select({dim}, 0), {dim}, -1)",
        f"torch.slice_scatter({x}.clone(), {x}.narrow({dim}, 0, 1), {dim}, 1, 2)",
        f"torch.diagonal_scatter({x}.clone(), {x}.diagonal())",
        f'{x}.scatter_reduce({dim}, {order}, {x}, "{draw.one(("amax", "sum", "mean", "prod"))}")',
        f"{x}.put({index}.abs() % {max(draw.value(x).numel(), 1)}, {index}.to({x}.dtype), accumulate=True)",
        f"torch.searchsorted({x}.flatten().sort().values, {x})",
        f"torch.isin({x}, {x}.flatten()[:2])",
    )
    return draw.one(kinds)
