"""Ops whose derivative formulas make plain tensors: from sizes and numbers alone, or from a plain operand alone.

The formula of cumprod fills in ones, that of slice_scatter returns zeros, that of a power computes the logarithm of its
exponent. Such tensors are the same on all ranks: the first ones depend on no data, and a plain operand was accepted as
replicated by the op itself.
"""

from __future__ import annotations

_FROM_SIZES = (
    "_affine_grid_generator",
    "affine_grid_generator",
    "as_strided",
    "bernoulli_.Tensor",
    "copysign",
    "cummax",
    "cummin",
    "cumprod",
    "diagonal_scatter",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "index_put",
    "_index_put_impl",
    "_unsafe_index_put",
    "masked_scatter_backward",
    "mvlgamma",
    "nextafter",
    "normal",
    "poisson",
    "prod",
    "put",
    "select_scatter",
    "sgn",
    "slice_inverse",
    "slice_scatter",
    "trace",
    # Gradients of gradients: the second operand only lends its shape.
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "max_pool2d_backward",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
)
_FROM_PLAIN_OPERANDS = (
    "atan2",
    "index_fill.int_Tensor",
    "lerp.Tensor",
    "pow.Tensor_Tensor",
    "xlogy.Tensor",
)
MAKES_TENSORS = tuple(f"aten::{name}" for name in (*_FROM_SIZES, *_FROM_PLAIN_OPERANDS))
"""The names of these ops, or of single overloads; their in-place variants are meant, too."""
