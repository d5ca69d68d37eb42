"""Backward passes, hooks, accumulation and second derivatives."""

from __future__ import annotations

from ..draw import Draw
from .table import expression, line


def _with_graph(draw: Draw) -> str:
    return draw.tensor(lambda t: t.requires_grad and not t.is_complex())


def _leaf(draw: Draw) -> str:
    return draw.tensor(lambda t: t.requires_grad and t.is_leaf)


def loss(draw: Draw) -> str:
    """Return a scalar made from one or two tensors."""
    x = _with_graph(draw)
    kinds = (
        "{}.sum()",
        "({0} * {0}).sum()",
        "{}.cos().sum()",
        "({0} * {0}.detach()).sum()",
        "{}.mean()",
        "({} ** 2).mean()",
    )
    first = draw.one(kinds).replace("{}", "{0}").format(x)
    if draw.chance(0.3):
        return f"{first} + ({_with_graph(draw)} * 0.5).sum()"
    return first


@line(2.5)
def backward(draw: Draw) -> str:
    """A backward pass; gradients accumulate."""
    keep = "retain_graph=True" if draw.chance(0.5) else ""
    return f"({loss(draw)}).backward({keep})"


@expression(1.5)
def gradient(draw: Draw) -> str:
    """A gradient as a tensor."""
    x = _leaf(draw) if draw.chance(0.7) else _with_graph(draw)
    graph = draw.one((", create_graph=True", ", create_graph=True", ", retain_graph=True", ""))
    return f"torch.autograd.grad({loss(draw)}, {x}{graph}, allow_unused=True)[0]"


@expression(1)
def second(draw: Draw) -> str:
    """A second derivative."""
    x = _leaf(draw)
    first = f"torch.autograd.grad({loss(draw)}, {x}, create_graph=True)[0]"
    return f"torch.autograd.grad(({first} ** 2).sum(), {x}, retain_graph=True, allow_unused=True)[0]"


@line(1)
def hook(draw: Draw) -> str:
    """A hook, or a gradient that is kept.

    PyTorch crashes if a view gets a hook after a write to its base. Reading `grad_fn` brings the view up to date.
    """
    x = _with_graph(draw)
    return draw.one((f"{x}.grad_fn; {x}.register_hook(twice)", f"{x}.retain_grad()"))


@line(0.7)
def gradient_changed(draw: Draw) -> str:
    """A gradient that is dropped or changed."""
    x = draw.tensor(lambda t: t.is_leaf and t.grad is not None)
    return draw.one((f"{x}.grad = None", f"{x}.grad.zero_()", f"{x}.grad.mul_(2)", f"{x}.grad = {x}.grad * 2"))


@line(0.5)
def step(draw: Draw) -> str:
    """A step of an optimizer, by hand."""
    x = draw.tensor(lambda t: t.is_leaf and t.grad is not None)
    return f"with torch.no_grad(): {x}.sub_({x}.grad, alpha=0.5)"
