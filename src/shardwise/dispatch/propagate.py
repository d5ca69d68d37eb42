"""Sharding propagation: choose the factor of an op's rule that each mesh axis shards, for the least communication.

A pure function of layouts: nothing depends on the rank or on the order of a set. Each mesh axis has a few options:
shard one factor, leave operands Partial if the rule allows it, or nothing. The price of a choice is that of
redistributing the operands, of the collectives in kernels, and of a later reduction of Partial results. If there are
few combinations, all are tried; otherwise the axes are improved one at a time, in a few sweeps.
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
    FactorKind,
    FactorShardings,
    Passing,
    output_partial,
    passes,
    sharded_layout,
    summands,
)
from ..sharding.layout import Factor, Layout, PartialAxes, Sizes, dim_axes, divides_evenly
from .decision import Choice, Decision, KernelCost, Operand, Option, Priced, PriceParts, Result

_TRY_ALL = 25  # combinations up to which all are tried: two axes with a handful of options each
_DEFERRED = 0.5  # the share of a deferred reduction that is charged: it may merge with another one


class _Known(NamedTuple):
    """The layouts and prices of one tensor that were computed. Most choices share those of most of their tensors."""

    relevant: dict[Option, Option]
    """The options that change its layout, each mapped to itself, so that `get` returns None for all others."""
    priced: dict[Choice, Priced]
    """Keys are choices with None in the place of options that are not relevant."""


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
        self.any_goes = not kernels and True not in [factor.even for factor in bound.factors]
        """Whether all shardings of factors are possible together, as for most ops."""
        self._may_be_sharded = [i for i, factor in enumerate(bound.factors) if self._may_shard(i, factor.kind)]
        self._sharded_dims = _sharded_dims(operands)
        self._axes_in_use = self._find_axes_in_use()
        self._summands = {factor: summands(bound, factor) for factor in self._may_be_sharded}
        self._preferred: dict[int, tuple[int, ...]] = {}
        self._priced: dict[Choice, tuple[float, float]] = {}
        self._last: tuple[Choice, list[Layout], list[Layout]] | None = None
        """The choice that was priced last, with its layouts: often it is the one that is made."""
        self._passes = [passing for ops in self._axes_in_use.values() for op in ops for passing in passes(bound, op)]
        self._known_operands = [_Known(self._relevant_to_operand(operand), {}) for operand in operands]
        self._known_results = [_Known(self._relevant_to_result(result), {}) for result in results]

    def choose(self) -> Decision:
        """Return the cheapest choice; of equally cheap ones, the one that needs the least memory."""
        return self.decide(self.cheapest())

    def cheapest(self) -> Choice:
        """Return the choice that `choose` makes: an option for each mesh axis."""
        options = [self.options_of(axis) for axis in range(len(self.mesh_sizes))]
        followed = self._follow_largest(options)
        price = self._price(followed)[0]
        if price == 0.0:
            return followed  # no communication now or later: the usual case
        if math.prod(map(len, options)) > _TRY_ALL:
            # A search that changes one axis at a time would reduce a sum over two axes: leaving it open on one alone
            # gains nothing. So there is a second start, with all sums open.
            starts = dict.fromkeys([followed, tuple(map(self._leave_open, followed, options))])
            return self._cheapest([self._sweep(options, start) for start in starts])
        return self._cheapest(itertools.product(*options), price)

    def _cheapest(self, choices: Iterable[Choice], limit: float = math.inf) -> Choice:
        """Return the choice with the lowest price; of equally cheap ones, the first with the least memory.

        `limit` is the price of one of them in seconds: pricing of dearer ones stops early.
        """
        best: Choice = ()
        price = math.inf, math.inf
        for choice in choices:
            its_price = self._price(choice, limit)
            if not best or its_price < price:
                best, price = choice, its_price
                limit = min(limit, its_price[0])
        return best

    def _sweep(self, options: Sequence[Sequence[Option]], start: Choice) -> Choice:
        """Improve a choice one axis at a time, with all other axes unchanged, in at most three sweeps."""
        chosen = start
        for _ in range(3):
            before = chosen
            for axis, choices in enumerate(options):
                if len(choices) > 1:
                    left, right = chosen[:axis], chosen[axis + 1 :]
                    changed = [(*left, option, *right) for option in choices]
                    chosen = self._cheapest(changed, self._price(chosen)[0])
            if chosen == before:
                break
        return chosen

    def _follow_largest(self, options: Sequence[Sequence[Option]]) -> Choice:
        """Return for each axis the option that keeps the layout of the largest operand sharded over it."""
        followed = [choices[0] for choices in options]
        largest = [-1] * len(options)
        for size, factors, axes in self._sharded_dims:
            if len(factors) == 1:
                for axis in axes:
                    if size > largest[axis]:
                        largest[axis] = size
                        if factors[0] in options[axis]:
                            followed[axis] = factors[0]
        return tuple(followed)

    def _leave_open(self, followed: Option, choices: Sequence[Option]) -> Option:
        """Return the option that leaves operands Partial over an axis, if `followed` shards nothing over it."""
        return next((c for c in choices if isinstance(c, Passing)), None) if followed is None else followed

    # ---- options --------------------------------------------------------------------------------------------

    def options_of(self, axis: int) -> list[Option]:
        """Return the options of an axis. Operands that are all replicated over it stay so: slicing gains nothing."""
        if self.mesh_sizes[axis] == 1:
            return self._single_options(axis)
        ops = self._axes_in_use.get(axis)
        if ops is None:
            return [None]
        options: list[Option] = [None, *self._may_be_sharded]
        for op in ops:
            options += passes(self.bound, op)
        return options

    def _find_axes_in_use(self) -> dict[int, dict[str, None]]:
        """Return the axes over which an operand, or a layout that a result needs later, is sharded or Partial.

        The reduce ops of each axis are in the order in which they are found: `{0: {}, 1: {"sum": None}}`.
        """
        found: dict[int, dict[str, None]] = {axis: {} for _, _, axes in self._sharded_dims for axis in axes}
        layouts = [operand.layout for operand in self.operands]
        for result in self.results:
            goal = result.fixed or result.wanted
            if goal is not None:
                layouts.append(goal)
                found.update({axis: {} for dim in goal.dims for axis in dim_axes(dim)})
        for layout in layouts:
            for axis, op in layout.partial:
                found.setdefault(axis, {})[op] = None
        return found

    def _single_options(self, axis: int) -> list[Option]:
        """Return the option of an axis of size 1, where all are free: that of the first operand sharded over it."""
        for _, factors, axes in self._sharded_dims:
            if axis in axes and len(factors) == 1 and factors[0] in self._may_be_sharded:
                return [factors[0]]
        return [None]

    def _may_shard(self, factor: int, kind: FactorKind) -> bool:
        return factor in self.kernels if kind is FactorKind.KERNEL else kind is not FactorKind.REPLICATED

    def _preferred_order(self, factor: int) -> tuple[int, ...]:
        """Return the order of the axes over which the largest operand is sharded along a factor."""
        found = self._preferred.get(factor)
        if found is None:
            found, largest = (), -1
            for size, factors, axes in self._sharded_dims:
                if factor in factors and size > largest:
                    found, largest = axes, size
            self._preferred[factor] = found
        return found

    # ---- prices ---------------------------------------------------------------------------------------------

    def _shardings(self, choice: Choice) -> FactorShardings:
        """Return (axis, factor) for the axes that shard factors, those of one factor in its preferred order."""
        shardings = [(axis, option) for axis, option in enumerate(choice) if isinstance(option, int)]
        if len(shardings) > 1:
            shardings.sort(key=self._place)
        return tuple(shardings)

    def _place(self, sharding: tuple[int, int]) -> tuple[int, int, int]:
        axis, factor = sharding
        order = self._preferred_order(factor)
        return factor, order.index(axis) if axis in order else len(order), axis

    def _allowed(self, shardings: FactorShardings) -> bool:
        """Return whether these shardings are possible together.

        They divide factors that must be sharded evenly, use one kernel (or joint ones), and its axes have a group.
        """
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

    def _price(self, choice: Choice, limit: float = math.inf) -> tuple[float, float]:
        """Return seconds and bytes of a choice; infinity for both as soon as the seconds exceed the limit."""
        found = self._priced.get(choice)
        if found is None:
            found = self._make_price(choice, limit)
            if found[0] < math.inf:
                self._priced[choice] = found
        return found

    def _make_price(self, choice: Choice, limit: float) -> tuple[float, float]:
        shardings = () if self.any_goes else self._shardings(choice)
        if shardings and not self._allowed(shardings):
            return math.inf, math.inf
        seconds = memory = output_bytes = 0.0
        operands, results = [], []
        for index, operand in enumerate(self.operands):
            layout, price, nbytes = self._operand(index, choice)
            operands.append(layout)
            if operand.plain and layout is not operand.layout:
                return math.inf, math.inf
            seconds += price
            memory += nbytes
            if seconds > limit:
                return math.inf, math.inf
        for index in range(len(self.results)):
            layout, price, nbytes = self._result(index, choice)
            results.append(layout)
            seconds += price
            output_bytes += nbytes
        self._last = choice, operands, results
        if self.kernels:
            seconds += self._kernel_seconds(shardings, output_bytes)
        return seconds, memory + output_bytes

    def _kernel_seconds(self, shardings: FactorShardings, output_bytes: float) -> float:
        """Return the seconds of the collectives in the kernel of a choice; 0 if it uses none."""
        axes = tuple([axis for axis, factor in shardings if factor in self.kernels])
        if not axes:
            return 0.0
        rounds, traffic, _ = self.kernels[dict(shardings)[axes[0]]]  # of one kernel, which may handle several factors
        latency = rounds * self.links.seconds(axes, len(axes), 0.0) if rounds else 0.0
        return latency + traffic * output_bytes / min(self.links.bandwidth[axis] for axis in axes)

    def parts(self, choice: Choice) -> PriceParts | None:
        """Return the summands of the price of a choice; None if the choice is impossible."""
        if self._price(choice)[0] == math.inf:
            return None
        operands = [self._operand(i, choice)[:2] for i in range(len(self.operands))]
        results = [self._result(i, choice) for i in range(len(self.results))]
        kernel = self._kernel_seconds(self._shardings(choice), sum(nbytes for _, _, nbytes in results))
        return PriceParts(choice, tuple(operands), kernel, sum(price for _, price, _ in results))

    def _operand(self, index: int, choice: Choice) -> Priced:
        """Return an operand's layout in a choice, the price of redistributing it, and the bytes of its new shard."""
        relevant, priced = self._known_operands[index]
        key = tuple(map(relevant.get, choice))
        found = priced.get(key)
        if found is None:
            found = priced[key] = self._price_operand(self.operands[index], key)
        return found

    def _price_operand(self, operand: Operand, choice: Choice) -> Priced:
        position, tensor, now, itemsize, _ = operand
        partial = self._operand_partial(position, choice)
        layout = sharded_layout(tensor, self.bound, self.mesh_sizes, self._shardings(choice), partial)
        if layout is now:
            return layout, 0.0, 0
        return layout, estimate(now, layout, itemsize, self.links), layout.max_local_numel() * itemsize

    def _relevant_to_operand(self, operand: Operand) -> dict[Option, Option]:
        """Return the options that shard an operand, leave it Partial or make it Partial."""
        position = operand.position
        relevant: dict[Option, Option] = {factor: factor for dim in operand.tensor.dims for factor in dim}
        for factor, positions in self._summands.items():
            if position in positions:
                relevant[factor] = factor
        for passing in self._passes:
            if position in passing.operands:
                relevant[passing] = passing
        return relevant

    def _result(self, index: int, choice: Choice) -> Priced:
        """Return a result's layout in a choice, the price of reducing or redistributing it later, and its bytes."""
        relevant, priced = self._known_results[index]
        key = tuple(map(relevant.get, choice))
        found = priced.get(key)
        if found is None:
            found = priced[key] = self._price_result(self.results[index], key)
        return found

    def _price_result(self, result: Result, choice: Choice) -> Priced:
        output, tensor, itemsize, fixed, wanted = result
        shardings = self._shardings(choice)
        passed = tuple([(axis, option.op) for axis, option in enumerate(choice) if isinstance(option, Passing)])
        summed = output_partial(self.bound, output, shardings)
        partial = tuple(sorted((*summed, *passed))) if passed else summed
        layout = sharded_layout(tensor, self.bound, self.mesh_sizes, shardings, partial)
        nbytes = layout.max_local_numel() * itemsize
        if fixed is not None:
            price = estimate(layout, fixed, itemsize, self.links)
        elif wanted is not None:
            # Sums over sharded factors may be left open, as for micro-batches; those of Partial operands are reduced.
            arriving = Layout.make(self.mesh_sizes, layout.dims, passed)
            price = estimate(arriving, wanted, itemsize, self.links) + self._deferred(summed, nbytes)
        else:
            price = self._deferred(partial, nbytes)
        return layout, price, nbytes

    def _relevant_to_result(self, result: Result) -> dict[Option, Option]:
        """Return the options that shard a result or make it Partial."""
        is_reduced = self.bound.reduce[result.output] not in ("none", "same")
        factors = self._may_be_sharded if is_reduced else itertools.chain(*result.tensor.dims)
        return {option: option for option in (*factors, *self._passes)}

    def _operand_partial(self, position: int, options: Choice) -> PartialAxes:
        """Return (axis, op) for the axes on which an operand is Partial, or is added to a sum (see `summands`)."""
        partial = []
        for axis, option in enumerate(options):
            if isinstance(option, int):
                if position in self._summands[option]:
                    partial.append((axis, "sum"))
            elif option is not None and position in option.operands:
                partial.append((axis, _operand_op(self.bound, option)))
        return tuple(partial)

    def _deferred(self, partial: PartialAxes, nbytes: float) -> float:
        """Return the price of reducing a Partial result later, by a reduce-scatter."""
        if not partial:
            return 0.0
        axes = tuple(axis for axis, _ in partial)
        peers = math.prod(self.mesh_sizes[axis] for axis in axes)
        return _DEFERRED * self.links.seconds(axes, peers - 1, nbytes * (peers - 1) / peers)

    def decide(self, choice: Choice) -> Decision:
        """Return the layouts and shardings of a choice."""
        price = self._price(choice)[0]
        if self._last is not None and self._last[0] == choice:
            _, operands, results = self._last
        else:
            operands = [self._operand(i, choice)[0] for i in range(len(self.operands))]
            results = [self._result(i, choice)[0] for i in range(len(self.results))]
        shardings = self._shardings(choice)
        summed = any(self._summands[factor] for _, factor in shardings)
        return Decision(tuple(operands), tuple(results), shardings, price, summed)


def _operand_op(bound: Bound, passing: Passing) -> str:
    """Return the reduce op of Partial operands for that of the results: max and min are swapped by antitone ops."""
    if passing.op in ("max", "min") and passing.operands in bound.antitone and passing.operands not in bound.monotone:
        return "min" if passing.op == "max" else "max"
    return passing.op


def _sharded_dims(operands: Sequence[Operand]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return (elements of the operand, factors of the dim, axes) for each dim of an operand that is sharded now."""
    found = []
    for operand in operands:
        for dim, factors in zip(operand.layout.dims, operand.tensor.dims, strict=True):
            axes = dim[0].axes if len(dim) == 1 else dim_axes(dim)
            if axes:
                found.append((hint(math.prod(operand.tensor.shape)), factors, axes))
    return found
