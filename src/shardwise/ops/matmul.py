"""Matrix products, and distances between rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._torch.decompositions import pytorch_decomposition
from .call import Call
from .kernel import LocalCall, LocalResult
from .op import Local
from .registry import definitions_in

aten = torch.ops.aten
define = definitions_in(__name__)

# ---- products -------------------------------------------------------------------------------------------------------


def added(first: str, product: str) -> Callable[[Call], str]:
    """Return the rule of a product added to the first operand; for integers the summed factors must be replicated.

    Ranks without data would scale the first operand by fractions, which the op refuses for integers.
    """

    def rule(call: Call) -> str:
        dtype = call.tensors[0].dtype
        if dtype.is_floating_point or dtype.is_complex:
            return f"{first}, {product} ; linear 0+1 | 0+2"
        operands, _, result = product.partition(" -> ")
        summed = [name for name in dict.fromkeys(operands.replace(",", "").split()) if name not in result.split()]
        sides = " ".join(f"[{word}]" if word in summed else word for word in operands.replace(",", " ,").split())
        return f"{first}, {sides.replace(' ,', ',')} -> {result}"

    return rule


def trilinear(call: Call) -> str:
    """Return the rule: three tensors, each expanded by new dims, multiplied and summed over some dims."""
    ndim = call.ndim(0) + len(call.arg("expand1"))
    operands = []
    for position in range(3):
        missing = set(call.arg(f"expand{position + 1}"))
        operands.append(" ".join(f"x{d}" for d in range(ndim) if d not in missing))
    summed = set(call.arg("sumdim"))
    result = " ".join(f"x{d}" for d in range(ndim) if d not in summed)
    return f"{', '.join(operands)} -> {result} ; linear 0 | 1 | 2"


def _with_expanded_bias(call: LocalCall) -> LocalResult:
    """Run `addmv`, whose result for an empty matrix would have the shape of the bias, without broadcasting."""
    return call.run(self=call["self"].expand(call.local_shape()))


define("aten::mm", "m k, k n -> m n ; linear 0 | 1")
define("aten::bmm", "b m k, b k n -> b m n ; linear 0 | 1")
define("aten::mv", "m k, k -> m ; linear 0 | 1")
define(("aten::dot", "aten::vdot"), "k, k -> ; linear 0 | 1")
define("aten::addmm", added("m? n?", "m k, k n -> m n"))
define("aten::addmv", added("m?", "m k, k -> m"), local=Local(_with_expanded_bias, when="empty shard"))
define("aten::addr", "m? n?, m, n -> m n ; linear 0+1 | 0+2")
define("aten::addbmm", added("m? n?", "b m k, b k n -> m n"))
define("aten::baddbmm", added("b? m? n?", "b m k, b k n -> b m n"))
define("aten::_int_mm", "m k, k n -> m n")
define("aten::_trilinear", trilinear)

# ---- distances between rows -----------------------------------------------------------------------------------------

_DISTANCES = "b?.. p [m], b?.. r [m] -> b.. p r"
define("aten::_cdist_forward", _DISTANCES)
define("aten::_euclidean_dist", _DISTANCES, decomposition=pytorch_decomposition(aten._euclidean_dist.default))
define("aten::_cdist_backward", "b.. p r, b.. p [m], b.. r [m], b.. p r -> b.. p [m] ; linear 0")
define("aten::_pdist_forward", "[n] [m] -> _")
define("aten::_pdist_backward", "_, [n] [m], _ -> [n] [m]")
