"""Ops whose derivative formulas make plain tensors, from sizes and numbers alone: they are the same on all ranks.

The formula of cumprod fills in ones, that of slice_scatter returns zeros.
"""

from __future__ import annotations

import torch

MAKES_TENSORS: tuple[str, ...] = (
    "aten::_affine_grid_generator",
    "aten::affine_grid_generator",
    "aten::_linalg_det",
    "aten::as_strided",
    "aten::as_strided_copy",
    "aten::copysign",
    "aten::cummax",
    "aten::cummin",
    "aten::cumprod",
    "aten::diagonal_scatter",
    "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward",
    "aten::index_put",
    "aten::_index_put_impl",
    "aten::_unsafe_index_put",
    "aten::linalg_householder_product",
    "aten::masked_scatter_backward",
    "aten::mvlgamma",
    "aten::native_layer_norm_backward",
    "aten::nextafter",
    "aten::normal",
    "aten::poisson",
    "aten::prod",
    "aten::put",
    "aten::select_scatter",
    "aten::sgn",
    "aten::slice_inverse",
    "aten::slice_scatter",
    "aten::trace",
    # Gradients of gradients: the second operand only lends its shape.
    "aten::_adaptive_avg_pool2d_backward",
    "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d_backward",
    "aten::avg_pool2d_backward",
    "aten::avg_pool3d_backward",
    "aten::fractional_max_pool2d_backward",
    "aten::fractional_max_pool3d_backward",
    "aten::max_pool2d_backward",
    "aten::max_pool2d_with_indices_backward",
    "aten::max_pool3d_with_indices_backward",
    "aten::reflection_pad1d_backward",
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad1d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
)
"""The names of these ops; their in-place variants are meant, too."""

if torch.__version__ < (2, 13):  # type: ignore[operator]  # PyTorch's versions compare with tuples
    # The gradient is scattered into zeros.
    MAKES_TENSORS += (
        "aten::kthvalue",
        "aten::max",
        "aten::median",
        "aten::min",
        "aten::mode",
        "aten::nanmedian",
        "aten::sort",
        "aten::topk",
    )
