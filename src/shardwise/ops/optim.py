"""Fused updates of optimizers, and ops on lists of tensors whose rules follow from no op on one tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..notation.build import join
from .call import Call, has_finite_numbers
from .kernel import FactorShard, KernelRun, LocalCall, Reduce
from .op import ListKernel
from .registry import definitions_in
from .schema import tensor_arguments

define = definitions_in(__name__)

# ---- fused updates --------------------------------------------------------------------------------------------------


def fused(call: Call) -> str:
    """Return the rule: the update of one parameter, whose state is sharded like it.

    Step counts, scales and the like are replicated.
    """
    inputs, outputs = [], []
    for argument, tensor in zip(tensor_arguments(call.op), call.tensors, strict=True):
        listed = argument.kind == "Tensor[]" and tensor is not None and argument.name != "state_steps"
        inputs.append("x.." if listed or (tensor is None and argument.kind == "Tensor[]") else "_..")
        if listed and argument.write:
            outputs.append("x..")
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


for _name in ("adam", "adamw", "sgd", "adagrad"):
    define((f"aten::_fused_{_name}_.default", f"aten::_fused_{_name}_.tensor_lr"), fused)

# ---- lists ----------------------------------------------------------------------------------------------------------


def addcmul(call: Call) -> str:
    """Return the rule: the last operand is a tensor with a number for each element of the lists.

    Other overloads take plain numbers.
    """
    return join("b?.., b?.., b?.., _ -> b..", "linear 0+1 | 0+2" if has_finite_numbers(call) else "")


define(("aten::_foreach_addcmul.Tensor", "aten::_foreach_addcmul_.Tensor"), addcmul)
define(("aten::_foreach_addcdiv.Tensor", "aten::_foreach_addcdiv_.Tensor"), "b?.., b?.., b?.., _ -> b..")
define("aten::_foreach_max", "x.. -> ; monotone 0 ; reduce max")
define("aten::_foreach_powsum", "x.. -> ")

# ---- lists with one collective for all ------------------------------------------------------------------------------


def norms(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Return norms of tensors with any placements: those of local shards, merged by one reduction for the list."""
    order, tensors = float(call["ord"]), call["self"]
    empty = 0.0 if order >= 0 else math.inf
    dtype = call["dtype"]
    parts = [
        torch.linalg.vector_norm(t, order, dtype=dtype)
        if t.numel()
        else torch.full((), empty, dtype=dtype or t.dtype.to_real(), device=t.device)
        for t in tensors
    ]
    # Powers of norms would overflow in the narrow dtypes.
    stacked = torch.stack([part.double() for part in parts])
    if math.isinf(order):
        merged = yield Reduce(stacked, "max" if order > 0 else "min")
    elif order == 0:
        merged = yield Reduce(stacked, "sum")
    else:
        powers = yield Reduce(stacked.pow(order), "sum")
        merged = powers.pow(1.0 / order)
    return [value.to(part.dtype) for value, part in zip(merged.unbind(), parts, strict=True)]


def unscale(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Divide gradients by the loss scale; `found_inf` becomes 1 on all ranks if any rank finds infinity or NaN."""
    found: Tensor = call["found_inf"].clone()
    call.run(found_inf=found)
    overall = yield Reduce(found, "max")
    return {"found_inf": overall}


define("aten::_foreach_norm", "x.. -> ", list_kernel=ListKernel(norms))
define(
    "aten::_amp_foreach_non_finite_check_and_unscale_",
    "x.., _.., _.. -> x..",
    list_kernel=ListKernel(unscale, all_ranks=True),
)
