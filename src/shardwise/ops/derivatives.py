"""Ops whose derivative formulas make plain tensors: from sizes and numbers alone, or from a plain operand alone.

The formula of cumprod fills in ones, that of slice_scatter returns zeros. Such tensors are the same on all ranks.
"""

from __future__ import annotations

MAKES_TENSORS: tuple[str, ...] = (
    "aten::_affine_grid_generator",
    "aten::affine_grid_generator",
    "aten::as_strided",
    "aten::cummax",
    "aten::cummin",
    "aten::cumprod",
    "aten::diagonal_scatter",
    "aten::index_put",
    "aten::mvlgamma",
    "aten::prod",
    "aten::put",
    "aten::select_scatter",
    "aten::slice_scatter",
    "aten::trace",
)
"""The names of these ops; their in-place variants are meant, too."""
