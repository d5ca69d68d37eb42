"""How an op is served: by a rule, by a generated one, by other ops, or on gathered inputs.

>>> served_by(torch.ops.aten.mm.default), served_by(torch.ops.aten.nonzero.default)
('rule', 'gathered')
"""

from __future__ import annotations

from typing import Literal

import torch

from .._torch.decompositions import registered_decomposition
from .._torch.ops import OpOverload
from .._torch.schemas import is_composite
from .registry import resolve

Kind = Literal["rule", "generated", "decomposition", "gathered"]
KINDS: tuple[Kind, ...] = ("rule", "generated", "decomposition", "gathered")


def served_by(func: OpOverload, planned: bool | None = None) -> Kind:
    """Return how calls of an op are served: `rule`, `generated`, `decomposition` or `gathered`.

    A rule may refuse a call. `planned` is whether it took the call at hand; None to describe the calls that it takes.

    >>> served_by(torch.ops.aten.mm.default), served_by(torch.ops.aten.nonzero.default)
    ('rule', 'gathered')
    """
    found = resolve(func)
    if planned is None:
        planned = found.in_place_view is None
    if func is torch.ops.aten._local_scalar_dense.default:  # a single number needs no gathering
        return "rule"
    if planned and found.has_rule:
        return "generated" if found.op.origin == "generated" else "rule"
    by_others = found.decomposition is not None or found.in_place_view is not None or is_composite(func)
    by_others = by_others or registered_decomposition(func) is not None
    return "decomposition" if by_others else "gathered"
