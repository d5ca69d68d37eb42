"""Ops that move elements to other places, without a kernel: joins along a new dim, repeats, mirrored pads, triangles.

What works along a cut dim (slices, joins, rolls, pads) is in `kernels.shapes`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..notation.build import dims_text, join
from .call import Call
from .tables import register_table
from .views import MOVES


def stack(call: Call) -> str:
    """A list joined along a new dim: each rank joins its parts."""
    ndim = len(call.tensors[0][0].shape)
    names = [f"x{dim}" for dim in range(ndim)]
    at = call.arg("dim") % (ndim + 1)
    return join(f"{{{' '.join(names)}}} -> {' '.join((*names[:at], '_', *names[at:]))}", MOVES)


def repeat(call: Call) -> str:
    """Copies of a dim, one after the other: a cut of the dim becomes an interleaved one of the result."""
    repeats, ndim = list(call.arg("repeats")), call.ndim(0)
    new = len(repeats) - ndim
    result = ["_"] * new
    sizes = []
    for dim, times in enumerate(repeats[new:]):
        result.append(f"x{dim}" if times == 1 else f"([r{dim}] x{dim})" if times else "_")
        sizes += [f"r{dim}={times}"] if times > 1 else []
    operand = dims_text("x", ndim, {dim: "_" for dim, times in enumerate(repeats[new:]) if times == 0})
    return join(f"{operand} -> {' '.join(result)}", MOVES, *sizes)


def whole_pair(call: Call) -> str:
    """`rot90`: the two dims that turn are whole."""
    ndim, pair = call.ndim(0), [dim % call.ndim(0) for dim in call.arg("dims")]
    text = dims_text("x", ndim, dict.fromkeys(pair, "_"))
    return join(f"{text} -> {text}", MOVES)


def diag_embed(call: Call) -> str:
    """The last dim becomes the diagonal of two new ones, all of them whole."""
    ndim = call.ndim(0)
    pair = sorted(dim % (ndim + 1) for dim in (call.arg("dim1"), call.arg("dim2")))
    names = [f"x{dim}" for dim in range(ndim - 1)]
    result = list(names)
    for dim in pair:
        result.insert(dim, "_")
    return join(f"{' '.join(names)} _ -> {' '.join(result)}", MOVES)


def last_whole(dims: int, backward: bool = False) -> str:
    """The last dims are whole, those before are a batch; the backward has the input as a second operand."""
    windows = " ".join("_" * dims)
    operands = f"b.. {windows}, b.. {windows}" if backward else f"b.. {windows}"
    return f"{operands} -> b.. {windows} ; linear 0"


def shuffled(text: str, argument: str) -> Callable[[Call], str]:
    """A pixel shuffle: `r` and `s` are its factor."""

    def rule(call: Call) -> str:
        factor = call.arg(argument)
        return join(text, MOVES, f"r={factor}", f"s={factor}")

    return rule


def backward_sizes(call: Call) -> str:
    """`diagonal_backward`: zeros around the last dim, which becomes two whole ones."""
    sizes = tuple(call.arg("input_sizes"))
    ndim = len(sizes)
    pair = [call.arg("dim1") % ndim, call.arg("dim2") % ndim]
    operand, result = (dims_text("x", ndim, dict.fromkeys(pair, text)) for text in ("", "_"))
    return join(f"{operand} _ -> {result}", "linear 0", f"input_sizes=({result})")


def diagonal_scatter(call: Call) -> str:
    """A diagonal of two whole dims is replaced."""
    ndim = call.ndim(0)
    pair = [call.arg("dim1") % ndim, call.arg("dim2") % ndim]
    result, source = (dims_text("x", ndim, dict.fromkeys(pair, text)) for text in ("_", ""))
    return join(f"{result}, {source} _ -> {result}", "linear 0+1")


def unfold_backward(call: Call) -> str:
    """The windows of a dim are added up; the dim is whole."""
    sizes = tuple(call.arg("input_sizes"))
    if not sizes:
        return "_.. -> ; linear 0"
    text = dims_text("x", len(sizes), {call.arg("dim") % len(sizes): "_"})
    return join(f"{text} _ -> {text}", "linear 0", f"input_sizes=({text})")


def new_strided(call: Call) -> str:
    """A new tensor of the same shape is cut as the given one, another is made whole."""
    size = tuple(call.arg("size"))
    if size == call.shape(0):
        return "x.. -> x.. ; size=(x..)"
    return f"x.. -> {' '.join('_' for _ in size)} ; unread"


register_table(
    {
        "aten::stack": stack,
        "aten::repeat": repeat,
        "aten::rot90": whole_pair,
        "aten::tril": "x.. -> x.. ; linear 0",
        "aten::triu": "x.. -> x.. ; linear 0",
        "aten::diag_embed": diag_embed,
        "aten::trace": "_ _ -> ; linear 0",
        "aten::pixel_shuffle": shuffled("b.. (c [r] [s]) h w -> b.. c (h [r]) (w [s])", "upscale_factor"),
        "aten::pixel_unshuffle": shuffled("b.. c (h [r]) (w [s]) -> b.. (c [r] [s]) h w", "downscale_factor"),
        "aten::diagonal_backward": backward_sizes,
        "aten::diagonal_scatter": diagonal_scatter,
        "aten::unfold_backward": unfold_backward,
        "aten::new_empty_strided": new_strided,
        # Bounds in tensors of one number.
        **{f"aten::{kind}space.Tensor_Tensor": ", -> _" for kind in ("lin", "log")},
        **{
            f"aten::{kind}space.{which}": "-> _"
            for kind in ("lin", "log")
            for which in ("Tensor_Scalar", "Scalar_Tensor")
        },
        "aten::as_strided_scatter": "[x..], [y..] -> [x..] ; linear 0+1",
        **{f"aten::{kind}_pad{n}d": last_whole(n) for kind in ("reflection", "replication") for n in (1, 2, 3)},
        **{
            f"aten::{kind}_pad{n}d_backward": last_whole(n, backward=True)
            for kind in ("reflection", "replication")
            for n in (1, 2, 3)
        },
    }
)
