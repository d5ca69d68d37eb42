"""Normalizations: what is normalized together is whole, or merged by the kernels in `kernels/norm.py`."""

from __future__ import annotations

from collections.abc import Sequence

from ..notation.build import dims_text, normalized
from .call import Call
from .tables import register_table

GROUPED = "n (g [c]) [s..]"


def normalized_dims(ndim: int, count: int) -> tuple[str, str, str]:
    """The operand of a normalization over its last `count` dims, those dims alone, and a statistic of the operand.

    >>> normalized_dims(3, 1)
    ('x0 x1 k2', 'k2', 'x0 x1 1')
    """
    last = range(ndim - count, ndim)
    operand = dims_text("x", ndim, {dim: f"k{dim}" for dim in last})
    return operand, " ".join(f"k{dim}" for dim in last), dims_text("x", ndim, dict.fromkeys(last, "1"))


def kernel_clause(factors: str | Sequence[str]) -> str:
    """The clause that gives these factors to a kernel."""
    names = factors.split() if isinstance(factors, str) else factors
    return f"kernel {', '.join(names)}" if names else ""


def group_norm(call: Call) -> str:
    """Groups of channels, each normalized on its own: the groups may be cut, what is in one may not."""
    return f"{GROUPED}, (g [c]), (g [c]) -> {GROUPED}, n g, n g ; g={call.arg('group')} ; N=(n) ; C=((g c)) ; group=(g)"


def group_norm_backward(call: Call) -> str:
    """Its gradients; those of parameters are sums over the batch."""
    return (
        f"{GROUPED}, {GROUPED}, n g, n g, (g [c]) -> {GROUPED}, (g [c]), (g [c])"
        f" ; linear 0 ; g={call.arg('group')} ; N=(n) ; C=((g c)) ; group=(g)"
    )


def _weight(call: Call) -> tuple[str, str]:
    ndim = call.ndim(0)
    kept = normalized(ndim, call.arg("dim"))
    others = [dim for dim in range(ndim) if dim not in kept]
    return dims_text("x", ndim, {dim: f"[x{dim}]" for dim in others}), dims_text("x", ndim, dict.fromkeys(others, "1"))


def renorm(call: Call) -> str:
    """Each slice along one dim is made no longer than a limit."""
    slices, _ = _weight(call)
    return f"{slices} -> {slices}"


def weight_norm(call: Call) -> str:
    """A weight as direction and length, for each index of one dim."""
    weight, length = _weight(call)
    return f"{weight}, {length} -> {weight}, {length}"


def weight_norm_backward(call: Call) -> str:
    """Its gradients."""
    weight, length = _weight(call)
    return f"{weight}, {weight}, {length}, {length} -> {weight}, {length} ; linear 0"


register_table(
    {
        "aten::native_group_norm": group_norm,
        "aten::native_group_norm_backward": group_norm_backward,
        "aten::renorm": renorm,
        "aten::_weight_norm_interface": weight_norm,
        "aten::_weight_norm_interface_backward": weight_norm_backward,
        # With given statistics a normalization is elementwise; it saves none of its own.
        "aten::_native_batch_norm_legit_no_training": "n c s.., c, c, c, c -> n c s.., _, _",
    }
)
