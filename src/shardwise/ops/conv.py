"""Convolutions: which dims of input, weight and output belong together.

Channels are (g c) and (g o): groups, and channels within a group. Batch, groups and output channels are cut freely; cut
input channels are summed over. Along the spatial dims y0, y1, ... neighbours need each other's rows, which a kernel
brings; weights are whole there.
"""

from __future__ import annotations

from typing import NamedTuple

from ..notation.build import join
from .call import Call


class Texts(NamedTuple):
    """The patterns of one convolution."""

    input: str
    weight: str
    output: str
    bias: str
    groups: str
    kernels: list[str]


def texts(call: Call, ndim: int) -> Texts:
    """The patterns for tensors of so many dims, batch and channels included."""
    spatial = [f"y{i}" for i in range(ndim - 2)]
    window = " ".join(f"[k{i}]" for i in range(ndim - 2))
    grouped = call.arg("groups") != 1
    into, out = ("(g c)", "(g o)") if grouped else ("c", "o")
    weight = f"{into} o" if call.arg("transposed") else f"{out} c"
    rows = " ".join(spatial)
    return Texts(
        input=f"n {into} {rows}",
        weight=f"{weight} {window}",
        output=f"n {out} {rows}",
        bias=out,
        groups="groups=(g)" if grouped else "",
        kernels=spatial,
    )


def convolution(call: Call) -> str:
    """Linear in the input and the bias, and in the weight and the bias."""
    t = texts(call, call.ndim(0))
    sides = f"{t.input}, {t.weight}, {t.bias} -> {t.output}"
    return join(sides, "linear 0+2 | 1+2", t.groups, f"kernel {', '.join(t.kernels)}" if t.kernels else "")


def convolution_backward(call: Call) -> str:
    """Gradients of input, weight and bias; a bias knows nothing of input channels, so a kernel counts it once."""
    t = texts(call, call.ndim(1))
    sides = f"{t.output}, {t.input}, {t.weight} -> {t.input}, {t.weight}, {t.bias}"
    sizes = f"bias_sizes=({t.bias})" if call.arg("output_mask")[2] else ""
    return join(sides, "linear 0", sizes, t.groups, f"kernel {', '.join([*t.kernels, 'c'])}")
