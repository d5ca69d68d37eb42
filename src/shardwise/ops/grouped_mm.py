"""Grouped matrix products: each group of rows has its own matrix, as the tokens of each expert in a mixture have.

`F.grouped_mm(rows, matrices, offs=ends)` multiplies the rows up to `ends[0]` by `matrices[0]`, the rows from there to
`ends[1]` by `matrices[1]`, and so on. Two ops compute it and its gradients for distributed tensors:

| op | computes | rule |
|---|---|---|
| `shardwise::grouped_mm` | the product of each group's rows with its matrix | `s k, e k n, _ -> s n` |
| `shardwise::grouped_outer` | for each group the product of matrices along its rows | `k s, s n, _, e k n -> e k n` |

So rows, features and groups may all be sharded without gathering matrices. A rank that holds some of the rows
counts those of each group among them. A rank that holds some of the groups computes their rows and leaves zeros in the
others: the result is a Partial sum. Where one axis shards both rows and groups, rows travel (`grouped_exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.above_autograd import Keys
from .._torch.autograd import Context, QuickFunction
from .._torch.ops import OpOverload
from ..errors import InputError
from ..sharding.base import DTensorBase
from ..sharding.layout import Run
from .above_autograd import needs_grad, new_op, where_distributed
from .grouped_exchange import Exchange, exchange_of, exchanged_gradients, exchanged_product
from .grouped_local import grouped_mm, grouped_outer, local_ends
from .kernel import LocalCall
from .op import Local
from .registry import definitions_in

define = definitions_in(__name__)

# ---- on local shards ------------------------------------------------------------------------------------------------


class _Groups:
    """A run of consecutive groups: `rows[order]` puts their rows first, `back` undoes that."""

    def __init__(self, ends: Tensor, run: Run, rows: int) -> None:
        start, stop = run
        first = ends[start - 1] if start else torch.zeros_like(ends[0])
        self.ends = ends[start:stop] - first
        self.order = (torch.arange(rows, device=ends.device) + first) % max(rows, 1)

    def back(self, rows: Tensor) -> Tensor:
        """Undo `rows[order]`."""
        return torch.zeros_like(rows).index_copy(0, self.order, rows)


def _local_product(call: LocalCall) -> Tensor:
    """Multiply this rank's rows by those of its matrices whose groups they belong to."""
    rows, matrices = call["rows"], call["matrices"]
    held, groups = call.given[0].runs(call.at)[0], call.given[1].runs(call.at)[0]
    ends = local_ends(call["ends"], held)
    if groups == ((0, len(ends)),):
        return grouped_mm(rows, matrices, ends)
    result, taken = call.zeros(rows), 0
    for run in groups:
        part, count = _Groups(ends, run, rows.shape[0]), run[1] - run[0]
        product = grouped_mm(rows[part.order], matrices[taken : taken + count], part.ends)
        result, taken = result + part.back(product), taken + count
    return result


def _local_outer(call: LocalCall) -> Tensor:
    """Return the product of each group of rows that this rank has the result of."""
    left, right = call["left"], call["right"]
    held, groups = call.given[1].runs(call.at)[0], call.layouts[0].runs(call.at)[0]
    ends = local_ends(call["ends"], held)
    if groups == ((0, len(ends)),):
        return grouped_outer(left, right, ends)
    parts = [(run, _Groups(ends, run, right.shape[0])) for run in groups]
    products = [grouped_outer(left[:, part.order], right[part.order], part.ends) for _, part in parts]
    return torch.cat(products) if products else call.zeros(left)


_product = new_op("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor", grouped_mm)
_outer = new_op(
    "grouped_outer(Tensor left, Tensor right, Tensor ends, Tensor? like=None) -> Tensor",
    grouped_outer,
)
define("shardwise::grouped_mm", "s k, e k n, _ -> s n ; linear 0 | 1", local=Local(_local_product))
define("shardwise::grouped_outer", "k s, s n, _, e k n -> e k n ; linear 0 | 1", local=Local(_local_outer))

# ---- above autograd -------------------------------------------------------------------------------------------------


class _Product(QuickFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        result, ctx.exchange, arrived = _computed(rows, matrices, ends)
        ctx.save_for_backward(rows, matrices, ends, arrived)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices, ends, arrived = ctx.saved_tensors
        of_rows, of_matrices, _ = ctx.needs_input_grad
        if ctx.exchange is not None and isinstance(gradient, DTensorBase) and not torch.is_grad_enabled():
            return *exchanged_gradients(ctx.exchange, gradient, (arrived, matrices, ends), (of_rows, of_matrices)), None
        return (
            product(gradient, matrices.transpose(1, 2), ends) if of_rows else None,
            outer(rows.t(), gradient, ends, matrices) if of_matrices else None,
            None,
        )


def _computed(rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Exchange | None, Tensor | None]:
    """Return the product, below autograd, and, if its rows were exchanged, how, and the rows that arrived."""
    exchange = exchange_of(rows, matrices, ends)
    if exchange is None:
        return _product(rows, matrices, ends), None, None
    result, arrived = exchanged_product(exchange, rows, matrices, ends)  # type: ignore[arg-type]
    return result, exchange, arrived


class _Outer(QuickFunction):
    @staticmethod
    def forward(ctx: Context, left: Tensor, right: Tensor, ends: Tensor, like: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, right, ends)
        result: Tensor = _outer(left, right, ends, like)
        return result

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, right, ends = ctx.saved_tensors
        return (
            product(right, gradient.transpose(1, 2), ends).t() if ctx.needs_input_grad[0] else None,
            product(left.t(), gradient, ends) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the differentiable `grouped_mm` of distributed tensors."""
    if needs_grad((rows, matrices)):
        result: Tensor = _Product.apply(rows, matrices, ends)
        return result
    return _computed(rows, matrices, ends)[0]


def outer(left: Tensor, right: Tensor, ends: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the differentiable `grouped_outer` of distributed tensors."""
    like = None if like is None else like.detach()
    run = _Outer.apply if needs_grad((left, right)) else _outer
    result: Tensor = run(left, right, ends, like)
    return result


def _override(func: OpOverload) -> Callable[..., object]:
    """Return the override of the op's four forms.

    Without `offs` it is a product of two batches. Else groups divide the rows (2-D by 3-D), the summed dim (2-D by 2-D)
    or the columns of the result (3-D by 2-D).
    """

    def run(
        keys: Keys,
        left: Tensor,
        right: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if bias is not None or out_dtype not in (None, left.dtype):
            raise InputError(
                "F.grouped_mm of DTensors takes no bias and no out_dtype",
                "add each group's bias to its rows of the result, and cast by result.to(out_dtype)",
            )
        if offs is None:
            return torch.bmm(left, right)
        if left.dim() == 2:
            return product(left, right, offs) if right.dim() == 3 else outer(left, right, offs)
        return product(right.t(), left.transpose(1, 2), offs).t()

    return where_distributed(func, run)


define("aten::_grouped_mm", override=_override)
