"""Normal numbers from pairs of 32-bit words, by Box and Muller, in operations that round the same on every device.

Logarithm, sine and cosine are polynomials, evaluated by separate multiplications and additions: those of the libraries
differ between devices in the last bits. Their error is below 1e-7 (they are minimax fits).

A pair of words gives a point of the plane, whose coordinates are the two numbers. One word gives the point's radius and
its side of the y-axis, the other the angle to the x-axis.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF_TURN_COS = (9.9999994e-01, -1.2336982e00, 2.5365075e-01, -2.0810628e-02, 8.5819064e-04)
"""Coefficients of cos(t pi/2) for t in [-1, 1], in powers of t^2."""
HALF_TURN_SIN = (1.5707964e00, -6.4596379e-01, 7.9689927e-02, -4.6741576e-03, 1.5167853e-04)
"""Coefficients of sin(t pi/2) / t for t in [-1, 1], in powers of t^2."""
LOG = (-4.0, -1.3333364, -0.7994941, -0.59855837)
"""Coefficients of -2 log(m) / s for s = (m - 1) / (m + 1) and m in [sqrt(1/2), sqrt(2)], in powers of s^2."""
LOG_2 = -2.0 * math.log(2.0)
SQRT_HALF_BITS = 0x3F3504F3
SIGN, MAGNITUDE = -(2**31), 2**31 - 1
UNIT = 2.0**-31 - 2.0**-55
"""Scales 31 bits to (0, 1). The largest value is a little below 1, so its logarithm is never 0."""


def normal_pairs(words: Tensor, out: Tensor) -> Tensor:
    """Write two float32 normal numbers to `out` for each pair of int32 words, both of shape (n, 2)."""
    angle, radial = words[:, 0].contiguous().to(torch.float32).mul_(2.0**-31), words[:, 1].contiguous()
    radius = minus_two_log(radial)
    radius.mul_(_inverse_root(radius))
    radius.view(torch.int32).bitwise_xor_(radial.bitwise_and_(SIGN))
    square = angle * angle
    x = _polynomial(square, HALF_TURN_COS).mul_(radius)
    y = _polynomial(square, HALF_TURN_SIN).mul_(angle).mul_(radius)
    torch.complex(x, y, out=torch.view_as_complex(out))  # the fastest way to interleave two tensors
    return out


def _inverse_root(value: Tensor) -> Tensor:
    """Return 1 / sqrt(x), root and quotient rounded to nearest: MKL's `sqrt` and a GPU's `rsqrt` are not."""
    return value.rsqrt() if value.device.type == "cpu" else value.sqrt().reciprocal_()


def minus_two_log(words: Tensor) -> Tensor:
    """Return -2 log(u) in float32, where u in (0, 1) is made of the 31 low bits of each int32 word."""
    # u = m * 2**e with m in [sqrt(1/2), sqrt(2)): both are read from the bits of u.
    mantissa = words.bitwise_and(MAGNITUDE).to(torch.float32).add_(0.5).mul_(UNIT)
    bits = mantissa.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS).bitwise_right_shift_(23)
    bits.sub_(exponent << 23)
    ratio = (mantissa - 1.0).div_(mantissa.add_(1.0))
    value = _polynomial(torch.mul(ratio, ratio, out=mantissa), LOG).mul_(ratio)
    return value.add_(ratio.copy_(exponent).mul_(LOG_2))


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    *rest, last = coefficients
    value = x * last
    for coefficient in reversed(rest[1:]):
        value.add_(coefficient).mul_(x)
    return value.add_(rest[0])
