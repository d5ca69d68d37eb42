"""Pooling, resampling and their like: batch and channels are cut, the dims that are looked along are whole."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..notation.build import join
from ..notation.schema import KINDS
from .call import Call
from .tables import register_table


def last_whole(count: int, passing: str = "", sizes: str = "") -> Callable[[Call], str]:
    """The rule of an op whose tensors all end in this many whole dims, with cut dims in common before them."""
    text = " ".join(["b..", *["_"] * count])

    def rule(call: Call) -> str:
        outputs = sum(str(result.type) in KINDS for result in call.op._schema.returns)
        sides = f"{', '.join([text] * len(call.tensors))} -> {', '.join([text] * outputs)}"
        dtype = call.tensors[0].dtype
        exact = dtype.is_floating_point or dtype.is_complex  # averages of integers are rounded
        return join(sides, passing if exact else "", f"{sizes}=({text})" if sizes else "")

    return rule


def im2col(call: Call) -> str:
    """Windows of an image: a column for each, with the channels outermost."""
    return f"b.. c _ _ -> b.. (c [k]) _ ; linear 0 ; k={math.prod(call.arg('kernel_size'))}"


def col2im(call: Call) -> str:
    """The way back."""
    return f"b.. (c [k]) _ -> b.. c _ _ ; linear 0 ; k={math.prod(call.arg('kernel_size'))}"


def _resampling() -> dict[str, Callable[[Call], str]]:
    kinds = {
        **{f"upsample_nearest{n}d": n for n in (1, 2, 3)},
        **{f"_upsample_nearest_exact{n}d": n for n in (1, 2, 3)},
        **{"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_trilinear3d": 3, "upsample_bicubic2d": 2},
        **{"_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2},
    }
    rules = {f"aten::{name}": last_whole(n, "linear 0") for name, n in kinds.items()}
    rules |= {f"aten::{name}_backward": last_whole(n, "linear 0", "input_size") for name, n in kinds.items()}
    return rules


def _pools() -> dict[str, Callable[[Call], str]]:
    rules: dict[str, Callable[[Call], str]] = {}
    for n in (2, 3):
        for name in (f"max_pool{n}d_with_indices", f"adaptive_max_pool{n}d"):
            rules[f"aten::{name}"] = last_whole(n)
        for name in (f"avg_pool{n}d", f"_adaptive_avg_pool{n}d", f"adaptive_avg_pool{n}d"):
            rules[f"aten::{name}"] = last_whole(n, "linear 0")
        for name in ("max_pool{}d_with_indices", "adaptive_max_pool{}d", "avg_pool{}d", "_adaptive_avg_pool{}d"):
            rules[f"aten::{name.format(n)}_backward"] = last_whole(n, "linear 0")
        rules[f"aten::max_unpool{n}d"] = last_whole(n)
    rules["aten::avg_pool1d"] = rules["aten::adaptive_avg_pool1d"] = last_whole(1, "linear 0")
    return rules


_SAMPLED = {2: "y x", 3: "z y x"}

register_table(
    {
        **_resampling(),
        **_pools(),
        **{f"aten::grid_sampler_{n}d": f"n c {'_ ' * n}, n {p} _ -> n c {p} ; linear 0" for n, p in _SAMPLED.items()},
        **{
            f"aten::grid_sampler_{n}d_backward": (
                f"n c {p}, n c {'_ ' * n}, n {p} _ -> n c {'_ ' * n}, n {p} _ ; linear 0"
            )
            for n, p in _SAMPLED.items()
        },
        "aten::fractional_max_pool2d": "n c _ _, n c _ -> n c _ _, n c _ _",
        "aten::fractional_max_pool3d": "n c _ _ _, n c _ -> n c _ _ _, n c _ _ _",
        "aten::fractional_max_pool2d_backward": last_whole(2, "linear 0"),
        "aten::fractional_max_pool3d_backward": last_whole(3, "linear 0"),
        "aten::affine_grid_generator": lambda call: (
            f"n _ _ -> n {'_ ' * (len(call.arg('size')) - 1)} ; linear 0"
            f" ; size=(n {'_ ' * (len(call.arg('size')) - 1)})"
        ),
        "aten::im2col": im2col,
        "aten::col2im": col2im,
        "aten::native_channel_shuffle": "n [c] x.. -> n [c] x.. ; linear 0 ; monotone 0",
    }
)
