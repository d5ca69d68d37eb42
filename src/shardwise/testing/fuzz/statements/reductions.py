"""Reductions, scans, sorting, softmax and norms."""

from __future__ import annotations

from ..draw import Draw
from .table import expression, words

REDUCTIONS = words("""
    sum mean amax amin prod any all std var logsumexp norm count_nonzero nansum nanmean argmax argmin max min
    aminmax
""")
SCANS = words("""
    cumsum cumprod logcumsumexp cummax cummin
""")


@expression(6)
def reduction(draw: Draw) -> str:
    """A reduction of some dims, or of all."""
    name = draw.one(REDUCTIONS)
    x = draw.tensor()
    if name in ("max", "min"):
        result = draw.one((".values", ".indices"))
        return f"{x}.{name}()" if draw.chance(0.3) else f"{x}.{name}({draw.dim(x)}, {draw.chance(0.3)}){result}"
    if name == "aminmax":
        return f"torch.aminmax({x}).max" if draw.chance(0.3) else f"torch.aminmax({x}, dim={draw.dim(x)}).min"
    if draw.chance(0.3) and name not in ("logsumexp", "amax", "amin"):
        return f"{x}.{name}()"
    keep = ", keepdim=True" if draw.chance(0.3) and name != "count_nonzero" else ""
    if draw.chance(0.2) and name in ("sum", "mean", "amax", "amin", "std", "var", "logsumexp", "any", "all"):
        return f"{x}.{name}(({draw.dim(x)}, {draw.dim(x)}){keep})"
    at = f"dim={draw.dim(x)}" if name == "norm" else f"{draw.dim(x)}"
    return f"{x}.{name}({at}{keep})"


@expression(2)
def scan(draw: Draw) -> str:
    """A scan along a dim."""
    x, name = draw.tensor(), draw.one(SCANS)
    part = draw.one((".values", ".indices")) if name in ("cummax", "cummin") else ""
    return f"{x}.{name}({draw.dim(x)}){part}"


@expression(1.5)
def sorting(draw: Draw) -> str:
    """Sorted values, their places, the largest ones."""
    x = draw.dims()
    dim = draw.dim(x)
    kinds = (
        f"torch.sort({x}, dim={dim}, stable=True).values",
        f"torch.sort({x}, dim={dim}, stable=True, descending=True).indices",
        f"torch.argsort({x}, dim={dim}, stable=True)",
        f"{x}.topk({draw.one((1, 2))}, {dim}).values",
        f"{x}.unique()",
        f"{x}.kthvalue(1, {dim}).values",
        f"{x}.clone().median({dim}).values",  # of an expanded tensor, PyTorch reads memory outside of it
        f"torch.quantile({x}, 0.5, dim={dim})",
        f"torch.diff({x}, dim={dim})",
    )
    return draw.one(kinds)


@expression(2)
def normalised(draw: Draw) -> str:
    """Softmax and norms."""
    x = draw.floating(1)
    dim = draw.dim(x)
    shape = list(draw.value(x).shape[-1:])
    kinds = (
        f"torch.softmax({x}, {dim})",
        f"F.log_softmax({x}, {dim})",
        f"F.layer_norm({x}, {shape})",
        f"F.rms_norm({x}, {shape})",
        f"F.normalize({x}, dim={dim})",
        f"torch.linalg.vector_norm({x}, 2, {dim})",
        f"torch.linalg.vector_norm({x}, 1)",
        f"{x}.norm(3)",
        f"F.glu({x}, {dim})",
        f"F.softmin({x}, {dim})",
        f"{x}.renorm(2, 0, 1.0)",
        f"torch.trapezoid({x}, dim={dim})",
        f"torch.cumulative_trapezoid({x}, dim={dim})",
        f"torch.var_mean({x}, {dim})[1]",
        f"torch.std_mean({x})[0]",
    )
    return draw.one(kinds)


@expression(1)
def loss(draw: Draw) -> str:
    """Losses of two tensors."""
    x = draw.floating()
    value = draw.value(x)
    y = draw.tensor(lambda t: t.shape == value.shape and t.dtype == value.dtype)
    reduction = draw.one(("mean", "sum", "none"))
    name = draw.one(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"))
    return f'F.{name}({x}, {y}, reduction="{reduction}")'


@expression(1.5)
def number(draw: Draw) -> str:
    """A value that leaves the tensors."""
    x = draw.tensor()
    single = draw.tensor(lambda t: t.numel() == 1)
    kinds = (
        f"{single}.item()",
        f"float({single})",
        f"bool({single})",
        f"{x}.tolist()",
        f"len({x})",
        f"torch.equal({x}, {draw.tensor()})",
        f"{x}.is_contiguous()",
        f"bool(({x} > 0).any())",
        f"torch.allclose({x}, {x})",
        f"{x}.numel()",
        f"int({single})",
    )
    return draw.one(kinds)
