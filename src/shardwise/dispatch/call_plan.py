"""The plan of one op call: redistributions, the local call, and the specs of the results.

`plan_call` is what happens on a cache miss. It binds the op's rule to the shapes of the call, lets the propagator
choose, and writes down how to treat every argument. A plan holds no tensors and does not depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.ops import OpOverload
from .._torch.symbols import has_symbols, hinted, symbolic
from ..comm.cost import links_of
from ..comm.redistribute import plan_redistribution
from ..notation import Bound, local_size
from ..ops.resolve import ResolvedOp
from ..sharding.layout import Coordinate, Layout
from ..sharding.memory_order import meta_of
from ..sharding.mesh import MeshInfo
from ..sharding.spec import DTensorSpec
from ..world import rank_int
from .arguments import LOCALIZE, Argument, Constant, Treatment, Where, plain_target_error
from .bind_call import NO_LISTS, BoundCall, Place, bind_call, operand_layout
from .decision import Decision, KernelCost, Operand, Result
from .local_call import tensors_in
from .local_code import LocalCode, LocalRun
from .propagate import ShardingPropagator


class CallPlan(NamedTuple):
    """How to carry out a call. `run_local` takes the local arguments and returns the local results."""

    func: OpOverload
    args: tuple[Treatment, ...]
    kwargs: dict[str, Treatment]
    run_local: LocalRun
    results: Any
    """A spec for each tensor result, in the structure of the results; None where a result is no tensor."""
    writes: tuple[tuple[Where, int], ...]
    """(argument, result) for each argument that is written: its final spec may differ from the result's."""
    in_place: bool
    """Whether the local op may write straight into the local shards of what it writes."""
    is_view: bool
    local_view: bool
    """Whether the views share memory with the local shard of their base, so that a write to either changes both."""
    offsets: tuple[int, ...]
    """For each view its storage offset relative to that of its base, in elements of the view's dtype."""
    communication: tuple[str, ...]
    """The communication that the call implies, as texts: `other: f32[8@tp, 8] -> f32[8, 8]`."""


def plan_call(
    op: ResolvedOp,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    mesh_info: MeshInfo,
    lists: frozenset[Where] = NO_LISTS,
) -> CallPlan:
    """Return the plan of a call whose tensors are given as `Argument`s; for elements of lists, see `bind_call`."""
    found = bind_call(op, args, kwargs, mesh_info, lists)
    return _PlanWriter(found, _choose(found, mesh_info), args, kwargs, mesh_info, lists).write()


def propagator_of(found: BoundCall, mesh_info: MeshInfo) -> ShardingPropagator:
    """Return the propagator that chooses the layouts of a bound call."""
    return _propagator(found, mesh_info)(found.bound, found.operands, found.results)


def _propagator(
    found: BoundCall, mesh_info: MeshInfo
) -> Callable[[Bound, Sequence[Operand], Sequence[Result]], ShardingPropagator]:
    kernels: dict[int, KernelCost] = {}
    for index, factor in enumerate(found.bound.factors):
        if factor.handled_by_kernel:
            kernel = found.resolved.kernel(factor.name)
            kernels[index] = KernelCost(kernel.rounds, kernel.traffic, kernel.joint)
    groups = frozenset(mesh_info.groups) if kernels else None  # only kernels need a group; others are planned later
    links = links_of(mesh_info)

    def propagator(bound: Bound, operands: Sequence[Operand], results: Sequence[Result]) -> ShardingPropagator:
        return ShardingPropagator(bound, operands, results, mesh_info.sizes, links, kernels, groups)

    return propagator


def _choose(found: BoundCall, mesh_info: MeshInfo) -> Decision:
    propagator = _propagator(found, mesh_info)
    chosen = propagator(found.bound, found.operands, found.results)
    if not has_symbols([factor.size for factor in found.bound.factors]):
        return chosen.choose()
    # Sizes are symbols, and a comparison of prices would add guards to the graph. So the choice is made with the hints
    # of the sizes, and only the layouts of that one choice add guards.
    operands = [hinted(operand)._replace(layout=operand.layout.hinted()) for operand in found.operands]
    results = [
        hinted(result)._replace(
            fixed=result.fixed and result.fixed.hinted(), wanted=result.wanted and result.wanted.hinted()
        )
        for result in found.results
    ]
    return chosen.decide(propagator(hinted(found.bound), operands, results).cheapest())


class _PlanWriter:
    """Builds the plan of a call from the propagator's decision."""

    def __init__(
        self,
        found: BoundCall,
        decision: Decision,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mesh_info: MeshInfo,
        lists: frozenset[Where],
    ) -> None:
        self.found, self.decision, self.args, self.kwargs = found, decision, args, kwargs
        self.mesh_info, self.lists = mesh_info, lists
        self.op, self.func = found.resolved, found.resolved.func
        self.communication: list[str] = []

    def write(self) -> CallPlan:
        layouts = dict(zip(self.found.places, self.decision.operands, strict=True))
        args = tuple(self._treat(i, value, layouts) for i, value in enumerate(self.args))
        kwargs = {name: self._treat(name, value, layouts) for name, value in self.kwargs.items()}
        specs = self._result_specs()
        writes, in_place = self._writes(specs, args, kwargs)
        code = LocalCode(self.found, self.decision, self.mesh_info, bool(self.lists))
        indices = self._structured(list(range(len(specs))))
        run, collectives = code.run([indices] if self.lists else indices)  # an op on lists returns lists of one
        if collectives:
            self.communication.append(f"{collectives} collective(s) inside {self.func} over its sharded dim")
        local_view = self.op.is_view and args[0] is LOCALIZE and not code.makes_new()
        return CallPlan(
            func=self.func,
            args=args,
            kwargs=kwargs,
            run_local=run,
            results=self._structured(specs),
            writes=writes,
            in_place=in_place and not code.makes_new(),
            is_view=self.op.is_view,
            local_view=local_view,
            offsets=self._offsets(),
            communication=tuple(self.communication),
        )

    # ---- arguments ----------------------------------------------------------------------------------------------

    def _treat(self, where: Where, value: object, layouts: Mapping[Place, Layout]) -> Treatment:
        name = self.op.names[where] if isinstance(where, int) else where
        if isinstance(value, Argument):
            return self._treat_tensor(name, value, layouts.get((where, None)))
        if isinstance(value, (list, tuple)) and any(isinstance(element, Argument) for element in value):
            return [
                self._treat_tensor(f"{name}[{i}]", element, layouts.get((where, i)))
                if isinstance(element, Argument)
                else None
                for i, element in enumerate(value)
            ]
        if value is not None and name in dict(self.found.bound.size_args):
            return self._local_sizes(name, value)
        return None

    def _treat_tensor(self, name: str, argument: Argument, layout: Layout | None) -> Treatment:
        if argument.spec is None:
            return None
        if layout is None or layout is operand_layout(self.op, argument, self.mesh_info.sizes):
            return LOCALIZE
        target = DTensorSpec.from_layout(self.mesh_info, layout, argument.meta)
        steps = plan_redistribution(argument.spec, target).plan
        if steps.collectives:
            self.communication.append(f"{name}: {argument.spec!r} -> {target!r}")
        return target if steps.steps else LOCALIZE

    def _local_sizes(self, name: str, value: Any) -> Treatment:
        """Return the local value of a size argument on each rank, or None if it is unchanged."""
        bound, shardings, mesh_info = self.found.bound, self.decision.shardings, self.mesh_info

        def sizes_at(at: Coordinate) -> list[int]:
            local = local_size(bound, name, value, mesh_info.sizes, shardings, at)
            return local if isinstance(local, list) else [local]

        given = list(value) if isinstance(value, (list, tuple)) else [value]
        coordinates = mesh_info.coordinates if mesh_info.simulated else (mesh_info.coordinate,)
        by_rank = [sizes_at(at) for at in coordinates]
        if all(sizes == given for sizes in by_rank):
            return None
        local = [rank_int(column) for column in zip(*by_rank, strict=True)] if mesh_info.simulated else by_rank[0]
        return Constant(local if isinstance(value, (list, tuple)) else local[0])

    # ---- results ------------------------------------------------------------------------------------------------

    def _result_specs(self) -> list[DTensorSpec]:
        outputs = self.found.outputs
        flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        metas = [meta_of(t) for t in flat if isinstance(t, Tensor)]
        return [
            DTensorSpec.from_layout(self.mesh_info, layout, meta)
            for layout, meta in zip(self.decision.results, metas, strict=True)
        ]

    def _offsets(self) -> tuple[int, ...]:
        begins: list[Any] = [t.storage_offset() for t in tensors_in(self.found.outputs)] if self.op.is_view else []
        return tuple(map(symbolic, begins))

    def _structured(self, values: Sequence[object]) -> object:
        """Return these values, one for each tensor result, in the structure of the results; None for other results."""
        remaining, outputs = iter(values), self.found.outputs
        if isinstance(outputs, (tuple, list)):
            return type(outputs)(next(remaining) if isinstance(t, Tensor) else None for t in outputs)
        return next(remaining) if isinstance(outputs, Tensor) else None

    def _writes(
        self, specs: Sequence[DTensorSpec], args: Sequence[Treatment], kwargs: Mapping[str, Treatment]
    ) -> tuple[tuple[tuple[Where, int], ...], bool]:
        """Return `CallPlan.writes`, and whether the specs allow writing in place."""
        in_place = True
        for index, where in enumerate(self.found.written):
            spec, target = specs[index], self._written_spec(where)
            treatment = args[where] if isinstance(where, int) else kwargs[where]
            in_place = in_place and treatment is LOCALIZE and spec.layout is target.layout
            fresh = spec.with_layout(spec.layout)
            if spec.layout is not target.layout and plan_redistribution(fresh, target).plan.collectives:
                self.communication.append(f"result: {spec!r} -> {target!r}")
        return tuple((where, index) for index, where in enumerate(self.found.written)), in_place

    def _operand_specs(self) -> list[DTensorSpec]:
        arguments: list[Any] = []
        for value in (*self.args, *self.kwargs.values()):
            arguments += value if type(value) in (list, tuple) else [value]
        return [each.spec for each in arguments if isinstance(each, Argument) and each.spec is not None]

    def _written_spec(self, where: Where) -> DTensorSpec:
        written = self.args[where] if isinstance(where, int) else self.kwargs[where]
        spec: DTensorSpec | None = written.spec
        if spec is None:
            raise plain_target_error(self.func, written.meta.shape, self._operand_specs())
        return spec
