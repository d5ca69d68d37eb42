"""Elementwise functions of one, two and three tensors, comparisons, casts."""

from __future__ import annotations

from ..draw import Draw
from .table import expression, words

UNARY = words("""
    sin cos tanh sigmoid relu neg abs square sign floor ceil round trunc frac exp log1p sqrt rsqrt reciprocal
    erf expm1 atan asinh sinc logical_not isnan isfinite isinf isposinf signbit bitwise_not positive conj angle
    deg2rad nan_to_num exp2 logit erfinv sgn log2 cosh
""")
ACTIVATIONS = """F.gelu({}) F.silu({}) F.softplus({}) F.elu({}) F.leaky_relu({}, 0.1) F.hardtanh({}) F.hardswish({})
F.mish({}) F.logsigmoid({}) F.softsign({}) F.relu6({}) F.celu({}) F.selu({}) F.threshold({}, 0.5, -1.0)
F.hardshrink({}) F.tanhshrink({})""".replace("\n", " ").split(" F.")
BINARY = words("""
    add sub mul div maximum minimum fmax fmin atan2 hypot copysign remainder fmod floor_divide logical_and
    logical_or logical_xor eq ne lt le gt ge pow xlogy heaviside nextafter logaddexp bitwise_and bitwise_or
    true_divide float_power rsub ldexp
""")
OPERATORS = words("""
    + - * / // % < <= == != > >= & |
""")
DTYPES = words("""
    float32 float64 bfloat16 float16 int64 int32 bool complex64 uint8
""")


@expression(6)
def unary(draw: Draw) -> str:
    """A function of one tensor."""
    name = draw.one(UNARY)
    if draw.chance(0.5):
        return f"torch.{name}({draw.tensor()})"
    return f"{draw.tensor()}.{name}()"


@expression(2)
def activation(draw: Draw) -> str:
    """An activation function."""
    text = draw.one(ACTIVATIONS).removeprefix("F.").strip()
    return f"F.{text.format(draw.floating())}"


@expression(6)
def binary(draw: Draw) -> str:
    """A function of two tensors, or of a tensor and a number."""
    x = draw.tensor()
    y = draw.broadcastable(x) if draw.chance(0.7) else draw.number()
    if draw.chance(0.4):
        operands = (x, y) if draw.chance(0.8) else (y, x)
        return f"{operands[0]} {draw.one(OPERATORS)} {operands[1]}"
    return f"torch.{draw.one(BINARY)}({x}, {y})"


@expression(1)
def scaled(draw: Draw) -> str:
    """A sum with a factor, or a quotient that is rounded."""
    x = draw.tensor()
    y = draw.broadcastable(x)
    kinds = ("torch.add({}, {}, alpha=2)", "torch.sub({}, {}, alpha=3)", 'torch.div({}, {}, rounding_mode="floor")')
    return draw.one(kinds).format(x, y)


@expression(1.5)
def ternary(draw: Draw) -> str:
    """A function of three tensors."""
    x = draw.tensor()
    y, z = draw.broadcastable(x), draw.broadcastable(x)
    kinds = (
        "torch.where({} > 0, {}, {})",
        "torch.addcmul({}, {}, {}, value=0.5)",
        "torch.addcdiv({}, {}, {})",
        "torch.lerp({}, {}, {})",
        "torch.clamp({}, {}, {})",
        "torch.where({}.isnan(), {}, {})",
    )
    return draw.one(kinds).format(x, y, z)


@expression(1.5)
def clamped(draw: Draw) -> str:
    """Bounds, and functions with numbers."""
    kinds = (
        "{}.clamp(-1, 1)",
        "{}.clamp(min=0)",
        "{}.clamp_max(0.5)",
        "torch.where({0} > 0, {0}, 0)",
        "torch.where({0} > 0, 1.5, {0})",
        "{}.lerp({0}, 0.5)",
        "{} ** 2",
        "2 ** {}",
        "{}.masked_fill({0} > 1, 0)",
        "torch.nan_to_num({}, 1.0)",
    )
    text = draw.one(kinds)
    return text.replace("{}", "{0}").format(draw.tensor())


@expression(3)
def cast(draw: Draw) -> str:
    """Another dtype."""
    x, dtype = draw.tensor(), draw.one(DTYPES)
    kinds = (f"{x}.to(torch.{dtype})", f"{x}.type(torch.{dtype})", f"{x}.to(torch.{dtype}, copy=True)")
    if draw.chance(0.2):
        return f"{x}.type_as({draw.tensor()})"
    return draw.one(kinds)


@expression(0.5)
def complex_parts(draw: Draw) -> str:
    """Real and imaginary parts."""
    x = draw.tensor(lambda t: t.is_complex())
    return draw.one(("{}.real", "{}.imag", "torch.view_as_real({})", "{}.conj()", "{}.abs()", "{}.mH")).format(x)
