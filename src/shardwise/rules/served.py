"""How an op is served: by a rule, by a generated one, by other ops, or whole on gathered inputs.

>>> served_by(torch.ops.aten.mm.default), served_by(torch.ops.aten.nonzero.default)
('rule', 'whole')
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from . import generated
from .decompositions import instead_of
from .inverse import view_instead
from .registry import rule_for
from .schema import overload_key

OF_ONE_NUMBER = ("aten::_local_scalar_dense.default",)
"""Ops that take a single number, of which there is nothing to gather but that number."""

KINDS = ("rule", "generated", "decomposition", "whole")


def served_by(func: OpOverload, planned: bool | None = None) -> str:
    """`rule`, `generated`, `decomposition` or `whole`: how calls of an op are served.

    Rules may refuse calls that they do not fit. `planned` says of one call whether its rule took it; without it the
    answer is for calls that the rule takes.
    """
    found = rule_for(func)
    if planned is None:
        planned = found is not None and view_instead(func) is None
    if overload_key(func) in OF_ONE_NUMBER:
        return "rule"
    if planned and found is not None:
        return "generated" if is_generated(func) else "rule"
    apart = instead_of(func) is not None or view_instead(func) is not None or _is_composite(func)
    return "decomposition" if apart else "whole"


def is_generated(func: OpOverload) -> bool:
    """Whether the rule of an op comes from the generated table."""
    found = rule_for(func)
    return found is not None and found is generated.table().rule_for(func)


def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
