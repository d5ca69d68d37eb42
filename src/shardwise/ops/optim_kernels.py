"""Lists of tensors: norms of all gradients, and the check for overflow, each with one collective for the whole list."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kernel import Cut, KernelRun, LocalCall, Reduce
from .op import ListKernel
from .tables import LISTS, register


def norms(call: LocalCall, cut: Cut) -> KernelRun:
    """Norms of tensors that are cut anyhow: those of the parts, merged by one reduction for all."""
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


def unscale(call: LocalCall, cut: Cut) -> KernelRun:
    """Divide gradients by the loss scale; if any rank finds one that is not finite, all ranks learn of it."""
    found: Tensor = call["found_inf"].clone()
    call.run(found_inf=found)
    overall = yield Reduce(found, "max")
    return {"found_inf": overall}


register("aten::_foreach_norm", "x.. -> ")
register("aten::_amp_foreach_non_finite_check_and_unscale_", "x.., _.., _.. -> x..")
LISTS["aten::_foreach_norm"] = ListKernel(norms)
LISTS["aten::_amp_foreach_non_finite_check_and_unscale_"] = ListKernel(unscale, whole_mesh=True)
