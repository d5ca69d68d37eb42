"""The values of sharding propagation: its operands and results, what mesh axes may do, prices, and the decision."""

from __future__ import annotations

from typing import NamedTuple

from ..notation import BoundTensor, FactorShardings, Passing
from ..sharding.layout import Layout


class Operand(NamedTuple):
    """A tensor argument: its position in the rule, its shape and factors, its present layout, and its item size.

    A `plain` operand (a number, an ordinary 0-dim tensor) is the same on all ranks, and cannot be redistributed.
    """

    position: int
    tensor: BoundTensor
    layout: Layout
    itemsize: int
    plain: bool = False


class Result(NamedTuple):
    """A tensor result: its output in the rule, its shape and factors, and its item size.

    `fixed` is the layout it must have after the call, for a result that is written into an argument. `wanted` is the
    layout to which it will be redistributed later, for the gradient of an argument.
    """

    output: int
    tensor: BoundTensor
    itemsize: int
    fixed: Layout | None = None
    wanted: Layout | None = None


class Decision(NamedTuple):
    """A choice: the layouts of operands and results in the local call, and the factor that each axis shards."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    shardings: FactorShardings
    seconds: float
    has_summands: bool
    """Whether some operand is added to a sum over a sharded factor: then a rank with an empty shard contributes too."""


class KernelCost(NamedTuple):
    """The price of sharding a factor with a kernel: collectives, and bytes as a multiple of its local outputs."""

    rounds: int
    traffic: float
    joint: bool = False
    """Whether it handles several sharded factors at once."""


Option = int | Passing | None
"""What one axis does: shard a factor, leave operands Partial, or nothing."""

Choice = tuple[Option, ...]
"""One option for each mesh axis."""

Priced = tuple[Layout, float, float]
"""The layout of a tensor in a choice, the seconds to redistribute it to that layout (an operand) or to reduce it later
(a result), and the bytes of its shard."""


class PriceParts(NamedTuple):
    """The summands of the price of a choice, in seconds."""

    options: Choice
    operands: tuple[tuple[Layout, float], ...]
    """The layout of each operand in the local call, and the seconds to redistribute it."""
    kernel: float
    """For the collectives of kernels."""
    later: float
    """For reducing Partial results later, or redistributing results to the layouts that they need."""

    @property
    def seconds(self) -> float:
        """The price of the choice."""
        return sum(price for _, price in self.operands) + self.kernel + self.later
