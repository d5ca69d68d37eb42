"""Sharding propagation: which factor of an op's rule each mesh axis shards, so that communication is cheapest.

Pure: layouts in, layouts out, and nothing depends on the rank or on the order of a set. Each mesh axis has a few
options: shard one factor, leave operands Partial if the rule allows it, or nothing. The price of a choice is the
redistribution of the operands, what its kernels communicate, and a later reduction of Partial outputs. If there are few
combinations, all are tried; otherwise the axes are improved one at a time, in a few sweeps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .._torch.symbols import hint
from ..comm.cost import Links
from ..comm.estimate import estimate
from ..notation import (
    Bound,
    BoundTensor,
    FactorKind,
    FactorShardings,
    Passing,
    output_partial,
    passes,
    sharded_layout,
    summands,
)
from ..sharding.layout import Factor, Layout, PartialAxes, Sizes, divides_evenly

_TRY_ALL = 25  # combinations up to which all are tried: two axes with a handful of options each
_DEFERRED = 0.5  # a deferred reduction is cheaper: it may merge with another, or end as a reduce-scatter


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
    layout that it will be brought to later, for the gradient of an argument.
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


class PriceParts(NamedTuple):
    """What the price of a choice is made of."""

    options: tuple[Option, ...]
    operands: tuple[tuple[Layout, float], ...]
    """The layout of each operand in the local call, and the seconds of bringing it there."""
    kernel: float
    later: float
    """Of reducing Partial results later, or bringing results to where they are written."""

    @property
    def seconds(self) -> float:
        """The price."""
        return sum(price for _, price in self.operands) + self.kernel + self.later


class ShardingPropagator:
    """Chooses the layouts of one call: one bound rule on one mesh."""

    def __init__(
        self,
        bound: Bound,
        operands: Sequence[Operand],
        results: Sequence[Result],
        mesh_sizes: Sizes,
        links: Links,
        kernels: Mapping[int, KernelCost],
        groups: frozenset[tuple[int, ...]] | None = None,
    ) -> None:
        self.bound, self.operands, self.results = bound, operands, results
        self.mesh_sizes, self.links, self.kernels, self.groups = mesh_sizes, links, kernels, groups
        self.any_goes = not kernels and not any(factor.even for factor in bound.factors)
        """Whether all shardings of factors are possible together, as for most ops."""
        self.factors_of = [frozenset(itertools.chain(*operand.tensor.dims)) for operand in operands]
        self.factors_of_results = [frozenset(itertools.chain(*result.tensor.dims)) for result in results]
        # Most choices share the layouts of most of their tensors.
        self._summands_of: dict[int, frozenset[int]] = {}
        self._preferred: dict[int, tuple[int, ...]] = {}
        self._priced: dict[object, tuple[float, float]] = {}
        self._last: tuple[object, FactorShardings, tuple[Layout, ...], tuple[Layout, ...]] | None = None
        """The choice that was priced last, with its layouts: mostly it is the one taken."""
        self._priced_operands: dict[object, tuple[Layout, float, float]] = {}
        self._priced_results: dict[object, tuple[Layout, float, float]] = {}

    def choose(self) -> Decision:
        """Return the cheapest choice; of equally cheap ones, the one that needs the least memory."""
        return self.decide(self.cheapest())

    def cheapest(self) -> tuple[Option, ...]:
        """Return what each axis does in the cheapest choice."""
        options = [self.options_of(axis) for axis in range(len(self.mesh_sizes))]
        followed = tuple(self._follow_largest(axis, choices) for axis, choices in enumerate(options))
        if self._price(followed)[0] == 0.0:
            return followed  # no communication now or later: the usual case
        if math.prod(len(choices) for choices in options) > _TRY_ALL:
            # One axis at a time, sums over two axes would be reduced where leaving one of them open gains nothing.
            starts = dict.fromkeys([followed, tuple(map(self._leave_open, followed, options))])
            return self._cheapest([self._sweep(options, start) for start in starts])
        return self._cheapest(itertools.product(*options))

    def _cheapest(self, choices: Iterable[tuple[Option, ...]]) -> tuple[Option, ...]:
        """The choice with the lowest price; of equally cheap ones, the first with the least memory."""
        best: tuple[Option, ...] = ()
        price = math.inf, math.inf
        for choice in choices:
            its_price = self._price(choice, price[0])
            if not best or its_price < price:
                best, price = choice, its_price
        return best

    def _sweep(self, options: Sequence[Sequence[Option]], start: tuple[Option, ...]) -> tuple[Option, ...]:
        """Improve a choice one axis at a time, with all other axes unchanged, in at most three sweeps."""
        chosen = start
        for _ in range(3):
            before = chosen
            for axis, choices in enumerate(options):
                if len(choices) > 1:
                    chosen = self._cheapest((*chosen[:axis], option, *chosen[axis + 1 :]) for option in choices)
            if chosen == before:
                break
        return chosen

    def _follow_largest(self, axis: int, choices: Sequence[Option]) -> Option:
        """The option that keeps the layout of the largest operand that is sharded over this axis."""
        best: tuple[int, Option] = (-1, choices[0])
        for operand in self.operands:
            size = hint(math.prod(operand.tensor.shape))
            for dim, factors in zip(operand.layout.dims, operand.tensor.dims, strict=True):
                if size > best[0] and len(factors) == 1 and any(axis in part.axes for part in dim):
                    best = size, factors[0] if factors[0] in choices else best[1]
        return best[1]

    def _leave_open(self, followed: Option, choices: Sequence[Option]) -> Option:
        """The option that leaves operands Partial over an axis where nothing is sharded over it."""
        return next((c for c in choices if isinstance(c, Passing)), None) if followed is None else followed

    # ---- options --------------------------------------------------------------------------------------------

    def options_of(self, axis: int) -> list[Option]:
        """The options of an axis. If all operands are replicated over it, they stay so: slicing them gains nothing."""
        used = [_use(operand.layout, axis) for operand in self.operands]
        fixed = [_use(result.fixed or result.wanted, axis) for result in self.results]
        if self.mesh_sizes[axis] == 1:
            return self._single_options(axis)
        if not any(used) and not any(fixed):
            return [None]
        options: list[Option] = [factor for factor in range(len(self.bound.factors)) if self._may_shard(factor)]
        for op in dict.fromkeys(use for use in used + fixed if isinstance(use, str)):
            options += passes(self.bound, op)
        return [None, *options]

    def _single_options(self, axis: int) -> list[Option]:
        """The option of an axis with one rank, which is free: as the first operand sharded over it."""
        for operand in self.operands:
            for dim, factors in zip(operand.layout.dims, operand.tensor.dims, strict=True):
                if len(factors) == 1 and any(axis in f.axes for f in dim) and self._may_shard(factors[0]):
                    return [factors[0]]
        return [None]

    def _may_shard(self, index: int) -> bool:
        factor = self.bound.factors[index]
        if factor.kind is FactorKind.KERNEL:
            return index in self.kernels
        return factor.kind is not FactorKind.REPLICATED

    def _preferred_order(self, factor: int) -> tuple[int, ...]:
        """The order of the axes over which the largest operand is sharded along a factor."""
        found = self._preferred.get(factor)
        if found is None:
            found = self._preferred[factor] = self._find_preferred_order(factor)
        return found

    def _find_preferred_order(self, factor: int) -> tuple[int, ...]:
        best: tuple[int, tuple[int, ...]] = (-1, ())
        for operand in self.operands:
            size = hint(math.prod(operand.tensor.shape))
            for dim, factors in zip(operand.layout.dims, operand.tensor.dims, strict=True):
                axes = tuple(axis for part in dim for axis in part.axes)
                if factor in factors and axes and size > best[0]:
                    best = size, axes
        return best[1]

    # ---- prices ---------------------------------------------------------------------------------------------

    def _shardings(self, options: Sequence[Option]) -> FactorShardings:
        """The axes that shard factors in a choice; those of one factor are in its preferred order."""
        shardings = [(axis, option) for axis, option in enumerate(options) if isinstance(option, int)]
        if len(shardings) < 2:
            return tuple(shardings)

        def place(sharding: tuple[int, int]) -> tuple[int, int, int]:
            axis, factor = sharding
            order = self._preferred_order(factor)
            return factor, order.index(axis) if axis in order else len(order), axis

        return tuple(sorted(shardings, key=place))

    def _allowed(self, shardings: FactorShardings) -> bool:
        """Whether these shardings are possible together: even if needed, one kernel, over axes with a group."""
        if self.any_goes:
            return True
        by_factor: dict[int, tuple[int, ...]] = {}
        for axis, factor in shardings:
            by_factor[factor] = (*by_factor.get(factor, ()), axis)
        kernel_axes: list[int] = []
        kernels: list[KernelCost] = []
        for index, axes in by_factor.items():
            bound = self.bound.factors[index]
            if bound.even and not divides_evenly(self.mesh_sizes, Factor(bound.size, axes)):
                return False
            if index in self.kernels:
                kernels.append(self.kernels[index])
                kernel_axes += axes
        if self.groups is not None and len(kernel_axes) > 1 and tuple(sorted(kernel_axes)) not in self.groups:
            return False
        return len(kernels) <= 1 or all(kernel.joint for kernel in kernels)

    def _price(self, options: tuple[Option, ...], limit: float = math.inf) -> tuple[float, float]:
        """Seconds and bytes of a choice; infinite as soon as the seconds exceed the limit."""
        found = self._priced.get(options)
        if found is None:
            found = self._make_price(options, limit)
            if found[0] < math.inf:
                self._priced[options] = found
        return found

    def _make_price(self, options: tuple[Option, ...], limit: float) -> tuple[float, float]:
        shardings = self._shardings(options)
        if not self._allowed(shardings):
            return math.inf, math.inf
        seconds = memory = output_bytes = 0.0
        operands, results = [], []
        for i, operand in enumerate(self.operands):
            layout, price, nbytes = self._operand(i, shardings, options)
            operands.append(layout)
            if operand.plain and layout is not operand.layout:
                return math.inf, math.inf
            seconds += price
            memory += nbytes
            if seconds > limit:
                return math.inf, math.inf
        for i in range(len(self.results)):
            layout, price, nbytes = self._result(i, shardings, options)
            results.append(layout)
            seconds += price
            output_bytes += nbytes
        self._last = options, shardings, tuple(operands), tuple(results)
        if self.kernels:
            seconds += self._kernel_seconds(shardings, output_bytes)
        return seconds, memory + output_bytes

    def _kernel_seconds(self, shardings: FactorShardings, output_bytes: float) -> float:
        """Return the seconds of a choice's kernel, if it has one."""
        axes = tuple([axis for axis, factor in shardings if factor in self.kernels])
        if not axes:
            return 0.0
        rounds, traffic, _ = self.kernels[dict(shardings)[axes[0]]]  # of one kernel, which may handle several factors
        latency = rounds * self.links.seconds(axes, len(axes), 0.0) if rounds else 0.0
        return latency + traffic * output_bytes / min(self.links.bandwidth[axis] for axis in axes)

    def parts(self, options: tuple[Option, ...]) -> PriceParts | None:
        """What the price of a choice is made of; None if the choice is impossible."""
        shardings = self._shardings(options)
        if self._price(options)[0] == math.inf:
            return None
        operands = [self._operand(i, shardings, options)[:2] for i in range(len(self.operands))]
        results = [self._result(i, shardings, options) for i in range(len(self.results))]
        kernel = self._kernel_seconds(shardings, sum(nbytes for _, _, nbytes in results))
        return PriceParts(options, tuple(operands), kernel, sum(price for _, price, _ in results))

    def _operand(
        self, index: int, shardings: FactorShardings, options: Sequence[Option]
    ) -> tuple[Layout, float, float]:
        """An operand's layout in a choice, the price of redistributing it, and the bytes of the new local tensor."""
        operand, mine = self.operands[index], self.factors_of[index]
        partial = self._operand_partial(operand.position, options)
        key = index, tuple([sharding for sharding in shardings if sharding[1] in mine]), partial
        found = self._priced_operands.get(key)
        if found is None:
            layout = sharded_layout(operand.tensor, self.bound, self.mesh_sizes, key[1], partial)
            price = estimate(operand.layout, layout, operand.itemsize, self.links)
            nbytes = 0 if layout is operand.layout else layout.max_local_numel() * operand.itemsize
            found = self._priced_operands[key] = layout, price, nbytes
        return found

    def _result(self, index: int, shardings: FactorShardings, options: Sequence[Option]) -> tuple[Layout, float, float]:
        """A result's layout in a choice, the price of reducing or redistributing it later, and its bytes."""
        result, mine = self.results[index], self.factors_of_results[index]
        passed = tuple([(axis, option.op) for axis, option in enumerate(options) if isinstance(option, Passing)])
        summed = output_partial(self.bound, result.output, shardings)
        partial = tuple(sorted((*summed, *passed)))
        key = index, tuple([sharding for sharding in shardings if sharding[1] in mine]), summed, passed
        found = self._priced_results.get(key)
        if found is None:
            layout = sharded_layout(result.tensor, self.bound, self.mesh_sizes, key[1], partial)
            nbytes = layout.max_local_numel() * result.itemsize
            if result.fixed is not None:
                price = estimate(layout, result.fixed, result.itemsize, self.links)
            elif result.wanted is not None:
                # Sums over sharded factors may be left open, as those of micro-batches are; passed ones are reduced.
                arriving = Layout.make(self.mesh_sizes, layout.dims, passed)
                price = estimate(arriving, result.wanted, result.itemsize, self.links) + self._deferred(summed, nbytes)
            else:
                price = self._deferred(partial, nbytes)
            found = self._priced_results[key] = layout, price, nbytes
        return found

    def _operand_partial(self, position: int, options: Sequence[Option]) -> PartialAxes:
        """The axes on which an operand is Partial: it stays so, or it is added to a sum (see `summands`)."""
        partial = []
        known = self._summands_of
        for axis, option in enumerate(options):
            if option is None:
                continue
            if isinstance(option, int):
                if position in (known[option] if option in known else self._summands(option)):
                    partial.append((axis, "sum"))
            elif position in option.operands:
                partial.append((axis, _operand_op(self.bound, option)))
        return tuple(partial)

    def _summands(self, factor: int) -> frozenset[int]:
        found = self._summands_of.get(factor)
        if found is None:
            found = self._summands_of[factor] = summands(self.bound, factor)
        return found

    def _deferred(self, partial: PartialAxes, nbytes: float) -> float:
        """The price of reducing a Partial result later, by a reduce-scatter."""
        if not partial:
            return 0.0
        axes = tuple(axis for axis, _ in partial)
        peers = math.prod(self.mesh_sizes[axis] for axis in axes)
        return _DEFERRED * self.links.seconds(axes, peers - 1, nbytes * (peers - 1) / peers)

    def decide(self, options: tuple[Option, ...]) -> Decision:
        """Return the choice in which the axes do this."""
        if self._last is not None and self._last[0] == options:
            _, shardings, operands, results = self._last
        else:
            shardings = self._shardings(options)
            operands = tuple([self._operand(i, shardings, options)[0] for i in range(len(self.operands))])
            results = tuple([self._result(i, shardings, options)[0] for i in range(len(self.results))])
        summed = any(self._summands(factor) for _, factor in shardings)
        return Decision(operands, results, shardings, self._price(options)[0], summed)


def _operand_op(bound: Bound, passing: Passing) -> str:
    """The op of the operands, given that of the outputs: the same, except for antitone ops."""
    if passing.op in ("max", "min") and passing.operands in bound.antitone and passing.operands not in bound.monotone:
        return "min" if passing.op == "max" else "max"
    return passing.op


def _use(layout: Layout | None, axis: int) -> str | bool:
    """How a tensor uses an axis: the op if it is Partial there, else whether it is sharded over it."""
    if layout is None:
        return False
    for partial_axis, op in layout.partial:
        if partial_axis == axis:
            return op
    return any(axis in factor.axes for dim in layout.dims for factor in dim)
