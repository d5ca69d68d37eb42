"""How an op is served: by a rule, by a generated one, by other ops, or on gathered inputs.

>>> served_by(torch.ops.aten.mm.default), served_by(torch.ops.aten.nonzero.default)
('rule', 'gathered')
"""

from __future__ import annotations

from typing import Literal

import torch

from .._torch.decompositions import registered_decomposition
from .._torch.ops import OpOverload
from .._torch.schemas import has_cpu_kernel, is_composite
from .op import Never
from .registry import resolve
from .resolve import ResolvedOp
from .schema import has_functional_variant

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
        planned = not (found.in_place_view or isinstance(found.op.rule, Never) or decomposed_first(found))
    if func is torch.ops.aten._local_scalar_dense.default:  # a single number needs no gathering
        return "rule"
    if planned and found.has_rule:
        return "generated" if found.op.origin == "generated" else "rule"
    by_others = found.decomposition is not None or found.in_place_view is not None or is_composite(func)
    by_others = by_others or runs_without_out(found) or registered_decomposition(func) is not None
    return "decomposition" if by_others else "gathered"


def decomposed_first(found: ResolvedOp) -> bool:
    """Return whether PyTorch decomposes an op before its rule is asked for, except in inference mode.

    So it does with its composite ops, unless they have kernels of their own, too (`silu_backward`), or the op's record
    has both a rule and an override, which dispatches the op (`linear`).
    """
    record = (found.built_in or found).op
    dispatched = has_cpu_kernel(found.func) or (record.rule is not None and record.override is not None)
    return is_composite(found.func) and not dispatched


def runs_without_out(found: ResolvedOp) -> bool:
    """Return whether calls that no rule takes run without `out=`. The results are copied into the `out=` tensors."""
    return found.variant == "out" and has_functional_variant(found.func)
