"""Matrix products and their relatives."""

from __future__ import annotations

from collections.abc import Callable

from .call import Call
from .tables import register_table


def trilinear(call: Call) -> str:
    """Three tensors, each with dims of size 1 put in, multiplied and summed over some dims."""
    ndim = call.ndim(0) + len(call.arg("expand1"))
    operands = []
    for position in range(3):
        missing = set(call.arg(f"expand{position + 1}"))
        operands.append(" ".join(f"x{d}" for d in range(ndim) if d not in missing))
    summed = set(call.arg("sumdim"))
    result = " ".join(f"x{d}" for d in range(ndim) if d not in summed)
    return f"{', '.join(operands)} -> {result} ; linear 0 | 1 | 2"


def added(first: str, product: str) -> Callable[[Call], str]:
    """A product added to the first operand. That of integers is not summed over ranks.

    Ranks without data would scale the first operand by fractions, which the op refuses for integers.
    """

    def rule(call: Call) -> str:
        dtype = call.tensors[0].dtype
        if dtype.is_floating_point or dtype.is_complex:
            return f"{first}, {product} ; linear 0+1 | 0+2"
        operands, _, result = product.partition(" -> ")
        summed = [name for name in dict.fromkeys(operands.replace(",", "").split()) if name not in result.split()]
        whole = " ".join(f"[{word}]" if word in summed else word for word in operands.replace(",", " ,").split())
        return f"{first}, {whole.replace(' ,', ',')} -> {result}"

    return rule


_DISTANCES = "b?.. p [m], b?.. r [m] -> b.. p r"

register_table(
    {
        "aten::mm": "m k, k n -> m n ; linear 0 | 1",
        "aten::bmm": "b m k, b k n -> b m n ; linear 0 | 1",
        "aten::mv": "m k, k -> m ; linear 0 | 1",
        "aten::dot": "k, k -> ; linear 0 | 1",
        "aten::vdot": "k, k -> ; linear 0 | 1",
        "aten::addmm": added("m? n?", "m k, k n -> m n"),
        "aten::addmv": added("m?", "m k, k -> m"),
        "aten::addr": "m? n?, m, n -> m n ; linear 0+1 | 0+2",
        "aten::addbmm": added("m? n?", "b m k, b k n -> m n"),
        "aten::baddbmm": added("b? m? n?", "b m k, b k n -> b m n"),
        "aten::linear": "x.. k, n k, n -> x.. n ; linear 0+2 | 1+2",
        "aten::_int_mm": "m k, k n -> m n",
        "aten::_trilinear": trilinear,
        "aten::_cdist_forward": _DISTANCES,
        "aten::_euclidean_dist": _DISTANCES,
        "aten::_cdist_backward": "b.. p r, b.. p [m], b.. r [m], b.. p r -> b.. p [m] ; linear 0",
        "aten::_pdist_forward": "[n] [m] -> _",
        "aten::_pdist_backward": "_, [n] [m], _ -> [n] [m]",
    }
)
