"""What a mesh axis may do to a factor of a rule."""

from __future__ import annotations

from collections.abc import Set
from enum import Enum


class FactorKind(Enum):
    """What happens when a mesh axis shards a factor.

    >>> bound = bind(parse("m k [d], v -> m ; kernel v"), [(2, 3, 4), (5,)])
    >>> [f"{factor.name}: {factor.kind.value}" for factor in bound.factors]
    ['m: pass-through', 'k: reduced', 'd: must be replicated', 'v: handled by a kernel']
    """

    PASS_THROUGH = "pass-through"
    """All outputs have the factor, and are sharded along it, or are the same on all ranks (`reduce same`)."""
    REDUCED = "reduced"
    """Some output lacks the factor: it is Partial, by the op of the `reduce` clause."""
    REPLICATED = "must be replicated"
    """No mesh axis may shard it: `[d]`, or missing in an output with `reduce none`, or of several sizes (`ragged`)."""
    KERNEL = "handled by a kernel"
    """It may be sharded if the op has a kernel for it: `kernel d`."""


def kind_of(brackets: bool, kernel: bool, lacking: Set[str]) -> FactorKind:
    """Return the kind of a factor. `lacking` holds the ops of the `reduce` clause for the outputs that lack it.

    >>> kind_of(brackets=False, kernel=False, lacking={"max"}), kind_of(False, False, {"same"})
    (<FactorKind.REDUCED: 'reduced'>, <FactorKind.PASS_THROUGH: 'pass-through'>)
    """
    if kernel:
        return FactorKind.KERNEL
    if brackets or "none" in lacking:
        return FactorKind.REPLICATED
    return FactorKind.REDUCED if lacking - {"same"} else FactorKind.PASS_THROUGH
