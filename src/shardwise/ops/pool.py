"""Pooling, resampling and other ops on images: batch and channels may be sharded, spatial dims must be replicated."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from .._torch.above_autograd import Keys, call_original
from .._torch.ops import OpOverload, schema_of
from ..notation.build import join
from .above_autograd import needs_grad, where_distributed
from .call import Call
from .registry import definitions_in
from .schema import KINDS

define = definitions_in(__name__)


def spatial_rule(dims: int, clause: str = "", sizes: str = "") -> Callable[[Call], str]:
    """Return the rule of an op all of whose tensors have the same leading dims, then `dims` spatial ones.

    `clause` applies to floating point numbers only: averages of integers are rounded. `sizes` is the argument, if any,
    that holds the sizes of the result.
    """
    text = " ".join(["b..", *["_"] * dims])

    def rule(call: Call) -> str:
        outputs = sum(str(result.type) in KINDS for result in schema_of(call.op).returns)
        sides = f"{', '.join([text] * len(call.tensors))} -> {', '.join([text] * outputs)}"
        dtype = call.tensors[0].dtype
        exact = dtype.is_floating_point or dtype.is_complex
        return join(sides, clause if exact else "", f"{sizes}=({text})" if sizes else "")

    return rule


def _names(dims: int, *ops: str) -> list[str]:
    """Return names of ops; `#` in them is the number of spatial dims."""
    return [f"aten::{op.replace('#', str(dims))}" for op in ops]


# ---- pooling --------------------------------------------------------------------------------------------------------

define(("aten::avg_pool1d", "aten::adaptive_avg_pool1d"), spatial_rule(1, "linear 0"))
for _n in (2, 3):
    define(_names(_n, "max_pool#d_with_indices", "adaptive_max_pool#d"), spatial_rule(_n))
    define(_names(_n, "max_unpool#d"), spatial_rule(_n), strides="channels last" if _n == 2 else "row-major")
    define(_names(_n, "avg_pool#d", "_adaptive_avg_pool#d", "adaptive_avg_pool#d"), spatial_rule(_n, "linear 0"))
    define(
        _names(
            _n,
            "max_pool#d_with_indices_backward",
            "adaptive_max_pool#d_backward",
            "avg_pool#d_backward",
            "_adaptive_avg_pool#d_backward",
            "fractional_max_pool#d_backward",
        ),
        spatial_rule(_n, "linear 0"),
        derivative_makes_tensors=True,  # zeros in the shape of the second operand, for gradients of gradients
    )
    _spatial = " ".join("_" * _n)
    define(_names(_n, "fractional_max_pool#d"), f"n c {_spatial}, n c _ -> n c {_spatial}, n c {_spatial}")


define("aten::max_pool2d_backward", derivative_makes_tensors=True)


def _max_pool1d(func: OpOverload) -> Callable[..., object]:
    """Return the override of `F.max_pool1d`.

    On a CPU, without gradients, PyTorch's kernel returns row-major results.
    """

    def run(keys: Keys, x: Tensor, *args: object, **kwargs: object) -> object:
        result = call_original(func, keys, x, *args, **kwargs)
        assert isinstance(result, Tensor)
        return result.contiguous() if x.device.type == "cpu" and not needs_grad([x]) else result

    return where_distributed(func, run)


define("aten::max_pool1d", override=_max_pool1d)


# ---- resampling -----------------------------------------------------------------------------------------------------

for _n, _kinds in (
    (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
    (2, "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d"),
    (2, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
):
    for _kind in _kinds.split():
        define(f"aten::{_kind}", spatial_rule(_n, "linear 0"))
        define(f"aten::{_kind}_backward", spatial_rule(_n, "linear 0", "input_size"))

# The output's positions, which a grid lists, may be sharded.
for _n, _positions in ((2, "y x"), (3, "z y x")):
    _image, _grid, _output = f"n c {' '.join('_' * _n)}", f"n {_positions} _", f"n c {_positions}"
    define(f"aten::grid_sampler_{_n}d", f"{_image}, {_grid} -> {_output} ; linear 0")
    define(
        f"aten::grid_sampler_{_n}d_backward",
        f"{_output}, {_image}, {_grid} -> {_image}, {_grid} ; linear 0",
        derivative_makes_tensors=True,
    )


def _affine_grid(call: Call) -> str:
    """Return the rule of a sharded batch; grids have new dims, of the sizes in the argument `size`."""
    spatial = " ".join("_" * (len(call.arg("size")) - 1))
    return f"n _ _ -> n {spatial} ; linear 0 ; size=(n {spatial})"


define("aten::affine_grid_generator", _affine_grid, derivative_makes_tensors=True)


# ---- between images and columns, between channels -------------------------------------------------------------------


def _windows_rule(inputs: str, outputs: str) -> Callable[[Call], str]:
    """Return the rule of an op between an image and the columns of its windows, which have the channels outermost."""
    return lambda call: f"{inputs} -> {outputs} ; linear 0 ; k={math.prod(call.arg('kernel_size'))}"


define("aten::im2col", _windows_rule("b.. c _ _", "b.. (c [k]) _"), strides="row-major")
define("aten::col2im", _windows_rule("b.. (c [k]) _", "b.. c _ _"))
define("aten::native_channel_shuffle", "n [c] x.. -> n [c] x.. ; linear 0 ; monotone 0", strides="channels last")
