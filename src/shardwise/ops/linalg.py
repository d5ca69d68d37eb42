"""Decompositions of matrices, and Fourier transforms: batches are cut, what is transformed is whole."""

from __future__ import annotations

from collections.abc import Callable

from ..notation.build import normalized
from .call import Call
from .tables import register_table


def batched(rule: str) -> Callable[[Call], str]:
    """A rule of matrices m, vectors v and numbers 1 for each matrix of a batch, as in `m -> m, v`.

    Operands whose batches differ are taken whole; an operand of one dim less than the first is a vector.
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
    """Matrices that are applied to columns of others, or to rows: each on its own."""
    rows = not call.arg("left", True)
    applied = "b.. n _" if rows else "b.. _ n"
    batches = {t.shape[: len(t.shape) - rank] for t, rank in zip(call.tensors, (2, 1, 2), strict=True)}
    return f"b.. _ _, b.. _, {applied} -> {applied}" if len(batches) == 1 else "_.., _.., _.. -> _.."


def lu_unpack(call: Call) -> str:
    """Factors of matrices; those that are not asked for have no elements."""
    data, pivots = ("b.. _ _" if call.arg(f"unpack_{what}") else "_" for what in ("data", "pivots"))
    return f"b.. _ _, b.. _ -> {pivots}, {data}, {data} ; reduce same"


def transform(call: Call) -> str:
    """A Fourier transform along some dims, which are linear."""
    ndim, dims = call.ndim(0), set(normalized(call.ndim(0), call.arg("dim")))
    text = " ".join("_" if d in dims else f"x{d}" for d in range(ndim))
    return f"{text} -> {text} ; linear 0"


def cross(call: Call) -> str:
    """Products of vectors along a dim."""
    ndim = call.ndim(0)
    dim = call.arg("dim", -1) % ndim
    operand, result = (" ".join(f"[x{d}{q}]" if d == dim else f"x{d}{q}" for d in range(ndim)) for q in ("?", ""))
    return f"{operand}, {operand} -> {result} ; linear 0 | 1"


register_table(
    {
        **{
            f"aten::{name}": batched(rule)
            for name, rule in {
                "cholesky": "m -> m",
                "cholesky_inverse": "m -> m",
                "cholesky_solve": "m, m -> m",
                "_cholesky_solve_helper": "m, m -> m",
                "geqrf": "m -> m, v",
                "linalg_cholesky_ex": "m -> m, 1",
                "linalg_eig": "m -> v, m",
                "_linalg_eigvals": "m -> v",
                "linalg_eigvals": "m -> v",
                "_linalg_eigh": "m -> v, m",
                "linalg_householder_product": "m, v -> m",
                "linalg_inv_ex": "m -> m, 1",
                "linalg_ldl_factor_ex": "m -> m, v, 1",
                "linalg_lu": "m -> m, m, m",
                "linalg_lu_factor_ex": "m -> m, v, 1",
                "linalg_lu_solve": "m, v, m -> m",
                "linalg_matrix_exp": "m -> m",
                "linalg_qr": "m -> m, m",
                "linalg_solve_triangular": "m, m -> m",
                "triangular_solve": "m, m -> m, m",
                "_linalg_det": "m -> 1, m, v",
                "_linalg_slogdet": "m -> 1, 1, m, v",
                "_linalg_solve_ex": "m, m -> x, m, v, 1",
                "_linalg_svd": "m -> m, v, m",
                "linalg_pinv.atol_rtol_tensor": "m, 1, 1 -> m",
            }.items()
        },
        # What one matrix of the batch is refused for, all ranks must learn.
        "aten::_linalg_check_errors": "[b..] -> ",
        "aten::lu_unpack": lu_unpack,
        "aten::linalg_ldl_solve": columns,
        "aten::ormqr": columns,
        "aten::_fft_r2c": transform,
        "aten::_fft_c2r": transform,
        "aten::_fft_c2c": transform,
        "aten::linalg_cross": cross,
    }
)
