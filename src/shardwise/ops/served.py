"""How an op is served: by a rule, by a generated one, by other ops, or on gathered inputs.

>>> served_by(torch.ops.aten.mm.default), served_by(torch.ops.aten.nonzero.default)
('rule', 'whole')
"""

from __future__ import annotations

import torch

from .._torch.decompositions import is_composite
from .._torch.ops import OpOverload
from .registry import resolve

KINDS = ("rule", "generated", "decomposition", "whole")


def served_by(func: OpOverload, planned: bool | None = None) -> str:
    """`rule`, `generated`, `decomposition` or `whole`: how calls of an op are served.

    Rules may refuse calls that they do not fit. `planned` says of one call whether its rule took it; without it the
    answer is for calls that the rule takes.
    """
    found = resolve(func)
    if planned is None:
        planned = found.in_place_view is None
    if func is torch.ops.aten._local_scalar_dense.default:  # of a single number there is nothing to gather
        return "rule"
    if planned and found.has_rule:
        return "generated" if found.op.origin == "generated" else "rule"
    by_others = found.decomposition is not None or found.in_place_view is not None or is_composite(func)
    return "decomposition" if by_others else "whole"
