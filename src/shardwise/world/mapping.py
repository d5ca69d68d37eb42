"""What an op is to a per-rank tensor: what it writes, what it returns, whether it views or draws at random.

Read once from the op's schema and kept, so that calling it later needs a dictionary lookup only.

>>> describe(torch.ops.aten.add_.Tensor).writes
((0, 'self'),)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import WorldError

__all__ = ["Op", "agreed", "describe", "generator_for", "same"]

# Namespaces of ops that talk to other ranks: mapping them would run each rank's on the fake group, which does
# nothing and says nothing.
_COMMUNICATING = {
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "_dtensor",
    "symm_mem",
}

# Written without the schema saying so.
_RUNNING_STATISTICS = ("running_mean", "running_var")
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": _RUNNING_STATISTICS,
    "aten::cudnn_batch_norm": _RUNNING_STATISTICS,
    "aten::miopen_batch_norm": _RUNNING_STATISTICS,
}

# Change sizes in place without being tagged as such.
_RESIZING = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::resize", "aten::set"}


@dataclass(frozen=True, slots=True)
class Op:
    """One op overload, as far as mapping it over ranks goes."""

    call: Callable[..., Any]
    name: str
    writes: tuple[tuple[int, str], ...]
    """Position and name of each argument it writes to."""
    returns: tuple[tuple[int, str] | None, ...]
    """For each result: the written argument it is, or None if it is a new tensor."""
    view: bool
    random: bool
    resizes: bool
    """Whether sizes of written arguments may change."""


def describe(func: Any) -> Op:
    """Read `func`'s schema. An op that communicates, and is not implemented for ranks, is refused here."""
    if func.namespace in _COMMUNICATING:
        raise WorldError(
            f"{func} is not available in a simulated world",
            "use the functional collectives (torch.ops._c10d_functional), or dist.all_reduce, broadcast, "
            "all_gather_into_tensor or reduce_scatter_tensor",
        )
    schema = func._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    writes: list[tuple[int, str]] = []
    by_alias: dict[frozenset[str], tuple[int, str]] = {}
    has_out = False
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        declared = alias is not None and alias.is_write
        if declared or argument.name in undeclared:
            place = (position, argument.name)
            writes.append(place)
            has_out |= argument.kwarg_only
            if declared:
                by_alias[frozenset(alias.before_set)] = place
    aliases = [result.alias_info for result in schema.returns]
    return Op(
        call=func._op,
        name=str(func),
        writes=tuple(writes),
        returns=tuple(by_alias.get(frozenset(a.before_set)) if a and a.is_write else None for a in aliases),
        view=any(a is not None and not a.is_write for a in aliases),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        resizes=has_out or torch.Tag.inplace_view in func.tags or schema.name in _RESIZING,
    )


def agreed(values: Sequence[Any], what: str) -> Any:
    """The value all ranks have in common; otherwise an error that says who has what."""
    first = values[0]
    if all(value == first or (value != value and first != first) for value in values):
        return first
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    listed = "; ".join(f"{value} on {_named(who)}" for value, who in ranks.items())
    raise WorldError(
        f"{what} gives one Python value, but the ranks differ: {listed}",
        "look at one rank with `x.shards[rank]`, or communicate first so that all ranks hold the same",
    )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def same(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors hold the same values, NaN being the same as NaN."""
    first = tensors[0]
    return all(t is first or _equal(t, first) for t in tensors[1:])


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())


def generator_for(arguments: Iterable[object], device: torch.device) -> torch.Generator:
    """The generator that a random op will draw from: the one passed, or the device's default."""
    for argument in arguments:
        if isinstance(argument, torch.Generator):
            return argument
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]
