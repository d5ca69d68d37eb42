"""Views, and functions that move elements without changing them."""

from __future__ import annotations

import math

from ..draw import Draw, NoChoice
from .table import expression


def _factors(draw: Draw, count: int) -> list[int]:
    """Return sizes with this product."""
    sizes: list[int] = []
    while count > 1 and len(sizes) < 3:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        sizes.append(draw.one(divisors))
        count //= sizes[-1]
    return [*sizes, count]


@expression(4)
def transposed(draw: Draw) -> str:
    """Dims in another order."""
    x = draw.dims(1)
    ndim = draw.value(x).dim()
    order = draw.random.sample(range(ndim), ndim)
    kinds = (
        f"{x}.transpose({draw.dim(x)}, {draw.dim(x)})",
        f"{x}.permute({order})",
        f"{x}.mT",
        f"{x}.t()",
        f"{x}.movedim({draw.dim(x)}, {draw.dim(x)})",
        f"{x}.T",
        f"{x}.swapaxes({draw.dim(x)}, {draw.dim(x)})",
    )
    return draw.one(kinds)


@expression(5)
def reshaped(draw: Draw) -> str:
    """Another shape of the same number of elements."""
    x = draw.tensor()
    sizes = _factors(draw, math.prod(draw.value(x).shape))
    if draw.chance(0.2):
        sizes[draw.random.randrange(len(sizes))] = -1
    kinds = (
        f"{x}.reshape({sizes})",
        f"{x}.view({sizes})",
        f"{x}.flatten()",
        f"{x}.view(-1)",
        f"{x}.ravel()",
        f"{x}.reshape({[1, *sizes]})",
        f"{x}.contiguous().view({sizes})",
        f"{x}.flatten({draw.dim(x)}, -1)",
        f"{x}.unflatten({draw.dim(x)}, (2, -1))",
    )
    return draw.one(kinds)


@expression(3)
def with_dims(draw: Draw) -> str:
    """Dims of size 1 added, dropped or expanded."""
    x = draw.tensor()
    shape = list(draw.value(x).shape)
    wider = [3 if size == 1 and draw.chance(0.7) else draw.one((size, -1)) for size in shape]
    kinds = (
        f"{x}.unsqueeze({draw.dim(x)})",
        f"{x}.squeeze()",
        f"{x}.squeeze({draw.dim(x)})",
        f"{x}[None]",
        f"{x}[..., None]",
        f"{x}.expand({wider})",
        f"{x}.expand({[2, *shape]})",
        f"{x}.unsqueeze(-1).expand({[*shape, 3]})",
        f"torch.broadcast_to({x}, {[2, *shape]})",
        f"torch.atleast_2d({x})",
    )
    return draw.one(kinds)


@expression(5)
def sliced(draw: Draw) -> str:
    """A part of a tensor, as a view."""
    x = draw.dims()
    dim = draw.dim(x)
    size = draw.size(x, dim)
    start = draw.random.randrange(max(size, 1))
    length = draw.random.randrange(max(size - start, 0) + 1)
    kinds = (
        f"{x}[{start}:]",
        f"{x}[..., {start}:{start + length}]",
        f"{x}[::2]",
        f"{x}[..., 1::2]",
        f"{x}.narrow({dim}, {start}, {length})",
        f"{x}.select({dim}, {draw.position(size)})",
        f"{x}[{draw.position(draw.size(x, 0))}]",
        f"{x}[..., {draw.position(draw.size(x, -1))}]",
        f"{x}.chunk({draw.one((2, 3))}, {dim})[0]",
        f"{x}.split({draw.one((1, 2, 3))}, {dim})[-1]",
        f"{x}.tensor_split(3, {dim})[1]",
        f"{x}.unbind({dim})[-1]",
        f"{x}.unfold({dim}, {draw.one((1, 2))}, {draw.one((1, 2))})",
        f"{x}.diagonal()",
        f"{x}[:{start}, {start}:]",
    )
    return draw.one(kinds)


@expression(0.7)
def strange_view(draw: Draw) -> str:
    """Views by strides or by dtype, detached views and copies."""
    x = draw.tensor()
    kinds = (
        f"{x}.as_strided((2,), (1,))",
        f"torch.as_strided({x}, (2, 2), (1, 1), 1)",
        f"{x}.view(torch.int32)",
        f"{x}.view(torch.uint8)",
        f"{x}.detach()",
        f"{x}.data",
        f"{x}.contiguous()",
        f"{x}.clone()",
        f"{x}.view_as({x})",
        f"{x}.clone(memory_format=torch.contiguous_format)",
    )
    kind = draw.one(kinds)
    if "view(torch." in kind and (x in draw.inexact or not bool(draw.value(x).isfinite().all())):
        raise NoChoice
    if "as_strided" in kind and not draw.storage_is_known(x):
        raise NoChoice
    return kind


@expression(3)
def moved(draw: Draw) -> str:
    """Elements in other places: copies."""
    x = draw.dims()
    dim = draw.dim(x)
    kinds = (
        f"{x}.flip({dim})",
        f"{x}.roll({draw.one((1, -1, 2))}, {dim})",
        f"{x}.roll(1)",
        f"{x}.repeat({[2] + [1] * (draw.value(x).dim() - 1)})",
        f"{x}.tile((2,))",
        f"{x}.tile((0,))",
        f"torch.repeat_interleave({x}, 2, {dim})",
        f"F.pad({x}, (1, 1))",
        f"F.pad({x}, (-1, 2), value=0.5)",
        f"{x}.rot90()",
        f"torch.diag({x})",
        f'F.pad({x}, (1, 0), mode="replicate")',
        f"torch.block_diag({x})",
    )
    return draw.one(kinds)


@expression(3)
def joined(draw: Draw) -> str:
    """Several tensors together."""
    x = draw.tensor()
    value = draw.value(x)
    y = draw.tensor(lambda t: t.dim() == value.dim() and t.shape[1:] == value.shape[1:])
    same = draw.shaped(value.shape)
    kinds = (
        f"torch.cat([{x}, {y}])",
        f"torch.cat([{x}, {same}], {draw.dim(x)})",
        f"torch.stack([{x}, {same}], {draw.dim(x)})",
        f"torch.hstack([{x}, {same}])",
        f"torch.vstack([{x}, {same}])",
        f"torch.stack([{x}, {same}], -1)",
        f"torch.cat([{x}, {same}, {x}], -1)",
    )
    return draw.one(kinds)
