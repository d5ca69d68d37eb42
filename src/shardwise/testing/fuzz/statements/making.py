"""New tensors, random numbers, and redistribution."""

from __future__ import annotations

from ..draw import FLOATS, OTHERS, Draw
from .table import expression


def leaf(draw: Draw) -> str:
    """Return a tensor with random values, placed anyhow."""
    shape = draw.shape()
    dtype = draw.one(FLOATS if draw.chance(0.75) else OTHERS)
    options = ""
    if dtype.is_floating_point:
        options += ", grad=True" if draw.chance(0.6) else ""
        options += ", special=True" if draw.chance(0.08) else ""
    where = draw.placements(shape, dtype)
    return f"leaf({shape}, {dtype}, {where}, seed={draw.random.randrange(1000)}{options})"


@expression(1)
def another(draw: Draw) -> str:
    """Another leaf."""
    return leaf(draw)


@expression(5)
def redistributed(draw: Draw) -> str:
    """The same tensor with other placements."""
    x = draw.tensor()
    return f"move({x}, {draw.placements(draw.value(x).shape, draw.value(x).dtype)})"


@expression(1.5)
def made_alike(draw: Draw) -> str:
    """A new tensor with the shape, dtype or placements of another."""
    x = draw.tensor()
    kinds = (
        "torch.zeros_like({})",
        "torch.ones_like({})",
        "torch.full_like({}, 3)",
        "{}.new_zeros((4, 3))",
        "{}.new_ones(())",
        "{}.new_full((2, 5), 2)",
        "{}.new_tensor([1, 2, 3])",
        "torch.empty_like({}).fill_(1)",
        "torch.zeros_like({}, dtype=torch.float64)",
        "{}.new_empty((3, 2)).fill_(0)",
        "torch.empty_like({0}).copy_({0})",
    )
    return draw.one(kinds).replace("{}", "{0}").format(x)


@expression(1.2)
def random(draw: Draw) -> str:
    """Random numbers, which equal those of one device."""
    x = draw.floating()
    kinds = (
        "torch.rand_like({})",
        "torch.randn_like({})",
        "F.dropout({}, 0.5)",
        "torch.bernoulli({}.sigmoid())",
        "torch.bernoulli({})",
        "torch.normal({}, {}.abs())",
        "torch.normal({}, {})",
        "torch.randint_like({}, 5)",
        "torch.multinomial({}.flatten().abs() + 1, 2)",
        "torch.multinomial({}, 1)",
        "torch.empty_like({}).uniform_(0, 1)",
        "F.dropout({}, 0.0)",
        "{}.bernoulli(0.3)",
        "torch.poisson({}.abs())",
    )
    return draw.one(kinds).replace("{}", "{0}").format(x)
