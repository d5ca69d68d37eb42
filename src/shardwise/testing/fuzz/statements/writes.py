"""Writes: in place, through views, by index, and into `out=`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..draw import Draw, NoChoice
from .table import expression, line, words

UNARY = words("""
    relu_ neg_ abs_ sin_ tanh_ sigmoid_ floor_ zero_ square_ exp_ sqrt_ round_ sign_ fill_(2) clamp_(-1,1)
    mul_(2) add_(1) div_(2) sub_(0.5) fill_(0.5) pow_(2) masked_fill_(True,1) cumsum_(0) tril_() nan_to_num_
    clamp_min_(0) t_ squeeze_ unsqueeze_(0) requires_grad_ detach_ logical_not_ fill_diagonal_(3)
""")
BINARY = words("""
    add_ mul_ sub_ div_ copy_ maximum copysign_ fmod_ atan2_ eq_ lt_ logical_and_ pow_ hypot_
""")
OUT = words("""
    add mul sub div maximum matmul atan2 pow eq logical_or fmod
""")


def _view(draw: Draw, x: str) -> str:
    """Return a view of a variable, to write through."""
    if draw.value(x).dim() == 0:
        return draw.one((f"{x}.view(1)", f"{x}[None]", f"{x}.unsqueeze(0)"))
    kinds = (
        f"{x}[0]",
        f"{x}[1:]",
        f"{x}[..., 0]",
        f"{x}[::2]",
        f"{x}.T",
        f"{x}.mT",
        f"{x}.view(-1)",
        f"{x}.flatten()",
        f"{x}.transpose(0, -1)",
        f"{x}[..., 1:]",
        f"{x}.unsqueeze(0)",
        f"{x}.narrow({draw.dim(x)}, 0, 1)",
        f"{x}.diagonal()",
        f"{x}.chunk(2)[-1]",
        f"{x}.expand({[2, *draw.value(x).shape]})",
        f"{x}.detach()",
        f"{x}.data",
        f"{x}.unfold(0, 1, 1)",
        f"{x}.select({draw.dim(x)}, -1)",
        f"{x}[:, 1:]",
    )
    return draw.one(kinds)


def _call(name: str, argument: str = "") -> str:
    return name if "(" in name else f"{name}({argument})"


def _written(draw: Draw, test: Callable[[Tensor], bool] = lambda t: True) -> str:
    """Return a variable to write. Writes through windows that overlap have no defined order."""
    x = draw.tensor(test)
    if draw.has_windows(x):
        raise NoChoice
    return x


def _has_dims(tensor: Tensor) -> bool:
    return tensor.dim() > 0


def _makes_integers_require_grad(draw: Draw, written: str, read: str) -> bool:
    """Return whether autograd would have an integer tensor require a gradient, after which its views raise errors."""
    target = draw.value(written)
    return draw.value(read).requires_grad and not (target.is_floating_point() or target.is_complex())


@line(4)
def in_place(draw: Draw) -> str:
    """A write to a tensor."""
    x = _written(draw)
    target = _view(draw, x) if draw.chance(0.4) else x
    return f"{target}.{_call(draw.one(UNARY))}"


@line(4)
def in_place_of_two(draw: Draw) -> str:
    """A write of another tensor to a tensor."""
    x = _written(draw)
    target = _view(draw, x) if draw.chance(0.4) else x
    name = draw.one(BINARY)
    if draw.chance(0.2):
        return f"{target}.{_call(name, draw.number())}"
    y = draw.broadcastable(x)
    if _makes_integers_require_grad(draw, x, y):
        raise NoChoice
    return f"{target}.{_call(name, y if y == target else draw.elsewhere(y, x))}"


@line(1)
def without_gradient(draw: Draw) -> str:
    """A write to a leaf, outside autograd."""
    x = _written(draw, lambda t: t.requires_grad)
    return f"with torch.no_grad(): {x}.{_call(draw.one(UNARY))}"


@line(4)
def assigned(draw: Draw) -> str:
    """An assignment to a part of a tensor."""
    x = _written(draw, _has_dims)
    size = draw.size(x, 0)
    index = f"{draw.index(size)}.clone()"  # an index that is written itself has no defined result
    y = draw.broadcastable(x)
    if draw.value(y).dim() <= 1 and _makes_integers_require_grad(draw, x, y):  # one number is not copied, but filled in
        raise NoChoice
    kinds = (
        f"{x}[{draw.position(size)}] = {draw.number()}",
        f"{x}[1:] = {draw.number()}",
        f"{x}[{draw.position(size)}] = {x}[{draw.position(size)}]{'.clone()' if draw.overlaps(x) else ''}",
        f"{x}[{x} > 0] = {draw.number()}",
        f"{x}[{index}] = {draw.number()}",
        f"{x}[..., 0] += 1",
        f"{x}[1:] *= 2",
        f"{x}[:-1] += {x}[1:].clone()",
        f"{x}[...] = {draw.elsewhere(y, x)}",
        f"{x}[:, 0] = {draw.elsewhere(y, x)}[..., 0]",
        f"{x}[{index}] += 1",
        f"{x}.T[0] = 1",
        f"{x}[::2] = {x}[::2].clone() * 2",
    )
    return draw.one(kinds)


@line(2)
def scattered(draw: Draw) -> str:
    """A write at indices."""
    x = _written(draw, _has_dims)
    dim = draw.dim(x)
    index = draw.tensor(lambda t: t.dtype is torch.int64)
    flat = f"{index}.flatten().abs() % {max(draw.size(x, dim), 1)}"
    order = f"{x}.argsort({dim}, stable=True)"
    source = f"{draw.elsewhere(index, x)}.to({x}.dtype)"
    kinds = (
        f"{x}.index_fill_({dim}, {flat}, 2)",
        f"{x}.scatter_({dim}, {order}, 1)",
        f"{x}.scatter_add_({dim}, {order}, {x}.clone())",
        f"{x}.index_add_({dim}, {flat}, {x}.index_select({dim}, {flat}))",
        f"{x}.masked_fill_({x} > 1, 1)",
        f"{x}.masked_scatter_({x} > 0, {x} * 2)",
        f"{x}.index_copy_({dim}, {flat}[:1], {x}.narrow({dim}, 0, 1).clone())",
        f"{x}.put_({index}.abs() % {max(draw.value(x).numel(), 1)}, {source}, accumulate=True)",
        f"{x}.resize_({list(draw.value(x).shape)})",
        f"{x}.swapaxes_(0, -1)",
        f"F.relu({x}, inplace=True)",
        f"F.dropout({x}, 0.5, inplace=True)",
    )
    kind = draw.one(kinds)
    if ".put_(" in kind and draw.overlaps(x):  # PyTorch does not refuse it, and writes in any order
        raise NoChoice
    return kind


@line(2)
def into_out(draw: Draw) -> str:
    """A result written into a tensor that is there already."""
    x = draw.tensor()
    y = draw.broadcastable(x)
    shape = torch.broadcast_shapes(draw.value(x).shape, draw.value(y).shape)
    memory = {draw.memory(name) for name in (x, y)}

    def out(shape: Sequence[int] | None = None) -> str:
        """Return a tensor that shares no memory with the operands, mostly of the shape of the result."""
        found = _written(draw, lambda t: shape is None or tuple(t.shape) == tuple(shape) or draw.chance(0.1))
        if draw.memory(found) in memory:
            raise NoChoice
        return found

    like = draw.value(x).shape
    kinds = (
        f"torch.{draw.one(OUT)}({x}, {y}, out={out(shape)})",
        f"torch.sin({x}, out={out(like)})",
        f"torch.sum({x}, {draw.dim(x)}, out={out()})",
        f"torch.cumsum({x}, {draw.dim(x)}, out={out(like)})",
        f"torch.cat([{x}, {x}], out={out()})",
        f"torch.mm({x}, {x}.T, out={out()})",
        f"torch.add({x}, {y}, out={out(shape)}[...])",
        f"torch.clamp({x}, min=0, out={out(like)})",
    )
    return draw.one(kinds)


@expression(0.7)
def into_new(draw: Draw) -> str:
    """A result written into an empty tensor of the same kind."""
    x = draw.tensor()
    y = draw.broadcastable(x)
    empty = f"{x}.new_empty(0)"
    kinds = (f"torch.add({x}, {y}, out={empty})", f"torch.mul({x}, {y}, out=torch.empty_like({x}))")
    return draw.one((*kinds, f"torch.sum({x}, 0, out={empty})", f"torch.exp({x}, out={empty})"))
