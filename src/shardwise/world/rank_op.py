"""What running an op on every rank depends on: what it writes, returns, views and draws, from its schema.

>>> describe(torch.ops.aten.add_.Tensor).writes
((0, 'self'),)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._torch.ops import OpOverload, builtin_of, schema_of

__all__ = ["RankOp", "describe"]

_RUNNING_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class RankOp:
    """Properties of one op overload that running it on every rank depends on."""

    call: Callable[..., object]
    name: str
    writes: tuple[tuple[int, str], ...]
    """Position and name of each argument that it writes."""
    returns: tuple[tuple[int, str] | None, ...]
    """For each result the written argument that it is, or None for a new tensor."""
    view: bool
    random: bool
    resizes: bool
    """Whether sizes of written arguments may change."""


def describe(func: OpOverload) -> RankOp:
    """Return the `RankOp` of an overload, from its schema and tags."""
    schema = schema_of(func)
    undeclared = _RUNNING_STATISTICS if _updates_running_statistics(schema) else ()
    writes: list[tuple[int, str]] = []
    by_alias: dict[frozenset[str], tuple[int, str]] = {}
    has_out = False
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        place = (position, argument.name)
        declared = alias is not None and alias.is_write
        if declared or argument.name in undeclared:
            writes.append(place)
            has_out |= argument.kwarg_only
            if alias is not None:
                by_alias[frozenset(alias.before_set)] = place
    aliases = [result.alias_info for result in schema.returns]
    return RankOp(
        call=builtin_of(func),
        name=str(func),
        writes=tuple(writes),
        returns=tuple(by_alias.get(frozenset(a.before_set)) if a and a.is_write else None for a in aliases),
        view=any(a is not None and not a.is_write for a in aliases),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        resizes=has_out or torch.Tag.inplace_view in func.tags,
    )


def _updates_running_statistics(schema: torch.FunctionSchema) -> bool:
    """Return whether an op writes running statistics: it has the argument `training`, and does not return them.

    The schemas of native_batch_norm, cudnn_batch_norm and miopen_batch_norm do not declare these writes.
    """
    takes = [argument.name for argument in schema.arguments]
    returns = [result.name for result in schema.returns]
    return "training" in takes and not any(f"{name}_out" in returns for name in _RUNNING_STATISTICS)
