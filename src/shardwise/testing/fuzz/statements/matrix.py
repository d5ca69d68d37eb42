"""Matrix products, linear layers, attention, convolution, linear algebra."""

from __future__ import annotations

from torch import Tensor

from ..draw import Draw, NoChoice
from .table import expression


def _matrix(tensor: Tensor) -> bool:
    return tensor.dim() >= 2


def _fitting(draw: Draw, x: str, last: int = -1, other: int = -2) -> str:
    """Return a variable that a matrix can be multiplied with; the transposed matrix if there is none."""
    value = draw.value(x)

    def fits(tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and tensor.dtype == value.dtype and tensor.shape[other] == value.shape[last]

    try:
        return draw.tensor(fits)
    except NoChoice:
        return f"{x}.mT"


@expression(5)
def product(draw: Draw) -> str:
    """A product of matrices, of matrices and vectors, or of batches of them."""
    x = draw.tensor(_matrix)
    y = _fitting(draw, x)
    kinds = ["{} @ {}", "torch.matmul({}, {})"]
    if draw.value(x).dim() == 2:
        kinds += ["torch.mm({}, {})", "torch.mm({1}, {1}.mT).mm({1})", 'torch.einsum("ij,jk->ik", {}, {})']
        kinds += ['torch.einsum("ij,jk->ki", {}, {})', "torch.chain_matmul({}, {})"]
    if draw.value(x).dim() == 3:
        kinds += ["torch.bmm({}, {})", "torch.bmm({0}, {0}.mT)", 'torch.einsum("bij,bkj->bik", {0}, {0})']
    text = draw.one(kinds)
    return text.format(x, y)


@expression(2)
def vector_product(draw: Draw) -> str:
    """Products with vectors."""
    x = draw.dims(1)
    size, dtype = draw.size(x, -1), draw.value(x).dtype
    v = draw.tensor(lambda t: t.dim() == 1 and t.dtype == dtype and t.shape[0] == size)
    kinds = ("{} @ {}", "torch.mv({}, {})", "torch.outer({1}, {1})", "torch.dot({1}, {1})", "torch.inner({}, {})")
    more = ("{1} @ {0}.mT", "torch.tensordot({0}, {1}, 1)", "torch.kron({1}, {1})", "torch.vdot({1}, {1})")
    text = draw.one(kinds + more)
    return text.format(x, v)


@expression(2)
def linear(draw: Draw) -> str:
    """A linear layer, or a sum with a product."""
    x = draw.tensor(_matrix)
    w = _fitting(draw, x, -1, -1)
    w = x if w.endswith(".mT") else w
    kinds = (f"F.linear({x}, {w})", f"F.linear({x}, {w}, {w}[:, 0])", f"torch.addmm({x}, {x}, {w}.mT)")
    return draw.one(
        (*kinds, f"torch.baddbmm({x}, {x}, {w}.mT, alpha=0.5)", f"F.bilinear({x}, {x}, {w}[None].mT @ {w})")
    )


@expression(1)
def attention(draw: Draw) -> str:
    """Scaled dot product attention."""
    q = draw.tensor(lambda t: t.is_floating_point() and t.dim() >= 3)
    k = draw.shaped(draw.value(q).shape)
    return f"F.scaled_dot_product_attention({q}, {k}, {q}, is_causal={draw.chance(0.3)})"


@expression(1.5)
def structured(draw: Draw) -> str:
    """Triangles, diagonals, powers and norms of matrices."""
    x = draw.tensor(_matrix)
    square = f"({x} @ {x}.mT)"
    kinds = (
        f"{x}.tril()",
        f"{x}.triu(1)",
        f"torch.linalg.norm({x})",
        f"torch.linalg.matrix_norm({x}, 1)",
        f"torch.linalg.matrix_power({square}, 2)",
        f"torch.linalg.det({square} + torch.diag_embed({x}.abs().sum(-1)))",
        f"torch.linalg.solve({square} + 9 * torch.diag_embed({x}.abs().sum(-1) + 1), {x})",
        f"torch.cdist({x}, {x} + 1)",
        f"torch.diag_embed({x})",
        f"torch.trace({x})",
        f"torch.cov({x})",
        f"torch.vander({x}.detach().flatten()[:3], 3)",
        f"torch.linalg.inv({square} + 9 * torch.diag_embed({x}.abs().sum(-1) + 1))",
    )
    return draw.one(kinds)


@expression(1)
def convolution(draw: Draw) -> str:
    """Convolution and pooling."""
    x = draw.tensor(lambda t: t.is_floating_point() and t.dim() in (3, 4))
    kinds = (
        f"F.avg_pool1d({x}, 2)",
        f"F.max_pool1d({x}, 2)",
        f"F.avg_pool2d({x}, 2)",
        f"F.max_pool2d({x}, 2, stride=1)",
        f"F.adaptive_avg_pool1d({x}, 2)",
        f"F.conv1d({x}, {x}[:2, :, :2])",
        f"F.conv2d({x}, {x}[:2, :, :2, :2], padding=1)",
        f"F.interpolate({x}, scale_factor=2)",
        f"F.batch_norm({x}, None, None, training=True)",
        f"F.group_norm({x}, 1)",
        f"F.instance_norm({x})",
    )
    return draw.one(kinds)


@expression(0.7)
def lookup(draw: Draw) -> str:
    """Embeddings, classes and cross entropy."""
    x = draw.tensor(lambda t: t.is_floating_point() and t.dim() == 2)
    index = draw.index(draw.size(x, 0))
    kinds = (
        f"F.embedding({index}.abs() % {draw.size(x, 0)}, {x})",
        f"F.cross_entropy({x}, {index}.flatten()[: len({x})].abs() % {draw.size(x, 1)})",
        f"F.one_hot({index}.abs(), {draw.one((4, 5, 8))})",
        f"F.one_hot({index}.abs())",
        f"F.nll_loss({x}, {index}.flatten()[: len({x})].abs())",
        f"F.embedding({index}, {x})",
        f"torch.bincount({index}.flatten())",
        f"torch.bucketize({x}, {x}[0].sort().values)",
        f"F.embedding_bag({index}.flatten()[None].abs() % {draw.size(x, 0)}, {x})",
    )
    return draw.one(kinds)
