"""Decompositions of matrices, and Fourier transforms: batches may be sharded, transformed dims must be replicated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..notation.build import normalized
from .call import Call
from .registry import definitions_in

aten = torch.ops.aten
define = definitions_in(__name__)


def batched(rule: str) -> Callable[[Call], str]:
    """Return a rule of matrices m, vectors v and numbers 1 for each matrix of a batch, as in `m -> m, v`.

    A result x is like the second operand, which is a vector if it has fewer dims than the first. Operands whose batches
    differ must be replicated.
    """
    inputs, outputs = (side.split(", ") for side in rule.split(" -> "))
    dims = {"m": " _ _", "v": " _", "1": ""}

    def text(call: Call) -> str:
        ranks = [2 if kind == "m" else 1 if kind == "v" else 0 for kind in inputs]
        kinds = list(inputs)
        if len(kinds) == 2 and kinds[1] == "m" and call.ndim(1) < call.ndim(0):
            ranks[1], kinds[1] = 1, "v"
        given = [(tuple(t.shape), rank) for t, rank in zip(call.tensors, ranks, strict=True) if t is not None]
        batches = {shape[: len(shape) - rank] for shape, rank in given}
        if len(batches) > 1:
            return f"{', '.join('_..' for _ in inputs)} -> {', '.join('_..' for _ in outputs)}"
        results = [kinds[1] if kind == "x" else kind for kind in outputs]
        return f"{', '.join('b..' + dims[k] for k in kinds)} -> {', '.join('b..' + dims[k] for k in results)}"

    return text


def columns(call: Call) -> str:
    """Return the rule: matrices that are applied to each column, or each row, of others."""
    rows = not call.arg("left", True)
    applied = "b.. n _" if rows else "b.. _ n"
    batches = {t.shape[: len(t.shape) - rank] for t, rank in zip(call.tensors, (2, 1, 2), strict=True)}
    return f"b.. _ _, b.. _, {applied} -> {applied}" if len(batches) == 1 else "_.., _.., _.. -> _.."


def lu_unpack(call: Call) -> str:
    """Return the rule: factors of matrices; those that the call does not request have no elements."""
    data, pivots = ("b.. _ _" if call.arg(f"unpack_{what}") else "_" for what in ("data", "pivots"))
    return f"b.. _ _, b.. _ -> {pivots}, {data}, {data} ; reduce same"


def transform(call: Call) -> str:
    """Return the rule: a Fourier transform along some dims; it is linear."""
    ndim, dims = call.ndim(0), set(normalized(call.ndim(0), call.arg("dim")))
    text = " ".join("_" if d in dims else f"x{d}" for d in range(ndim))
    return f"{text} -> {text} ; linear 0"


def cross(call: Call) -> str:
    """Return the rule: products of vectors along a dim."""
    ndim = call.ndim(0)
    dim = call.arg("dim", -1) % ndim
    operand, result = (" ".join(f"[x{d}{q}]" if d == dim else f"x{d}{q}" for d in range(ndim)) for q in ("?", ""))
    return f"{operand}, {operand} -> {result} ; linear 0 | 1"


def least_squares(a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> tuple[Tensor, ...]:
    """Solve by singular values ("gelsd") instead of PyTorch's default on CPUs, which pivots ("gelsy").

    Its pivots start from uninitialized memory, so the last bits of the solution differ from call to call, and from rank
    to rank.
    """
    if a.device.type != "cpu" or driver not in (None, "gelsy"):
        return NotImplemented
    solution, residuals, rank, values = aten.linalg_lstsq(a, b, rcond, driver="gelsd")
    return solution, residuals.new_empty(0), rank, values.new_empty(0)


define(("aten::cholesky", "aten::cholesky_inverse", "aten::linalg_matrix_exp"), batched("m -> m"))
define(("aten::cholesky_solve", "aten::_cholesky_solve_helper", "aten::linalg_solve_triangular"), batched("m, m -> m"))
define("aten::geqrf", batched("m -> m, v"))
define(("aten::linalg_cholesky_ex", "aten::linalg_inv_ex"), batched("m -> m, 1"))
define(("aten::linalg_eig", "aten::_linalg_eigh"), batched("m -> v, m"), strides="as run")
define(("aten::linalg_eigvals", "aten::_linalg_eigvals"), batched("m -> v"))
define("aten::linalg_householder_product", batched("m, v -> m"), derivative_makes_tensors=True)
define(("aten::linalg_ldl_factor_ex", "aten::linalg_lu_factor_ex"), batched("m -> m, v, 1"))
define("aten::linalg_lu", batched("m -> m, m, m"))
define("aten::linalg_lu_solve", batched("m, v, m -> m"))
define("aten::linalg_qr", batched("m -> m, m"))
define("aten::triangular_solve", batched("m, m -> m, m"))
define("aten::_linalg_det", batched("m -> 1, m, v"), derivative_makes_tensors=True)
define("aten::_linalg_slogdet", batched("m -> 1, 1, m, v"))
define("aten::_linalg_solve_ex", batched("m, m -> x, m, v, 1"))
define("aten::_linalg_svd", batched("m -> m, v, m"), strides="as run")
define("aten::linalg_pinv.atol_rtol_tensor", batched("m, 1, 1 -> m"))
define("aten::_linalg_check_errors", "[b..] -> ")  # an error in one matrix of the batch is raised on all ranks
define("aten::lu_unpack", lu_unpack)
define(("aten::linalg_ldl_solve", "aten::ormqr"), columns)
define(("aten::linalg_matrix_rank", "aten::linalg_matrix_power", "aten::linalg_pinv"), makes_tensors=True)
define(("aten::linalg_matrix_norm", "aten::linalg_cond"), makes_tensors=True)  # zeros for empty matrices
define("aten::linalg_lstsq", decomposition=least_squares)
define("aten::linalg_cross", cross)
define(("aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c"), transform, strides="as run")
