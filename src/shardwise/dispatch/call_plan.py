"""From one op call to its plan: what is redistributed, what runs on each rank, what comes out.

`plan_call` is what happens on a cache miss. It binds the op's rule to the shapes of the call, lets the propagator
choose, and writes down how to treat every argument. The plan holds no tensors and does not depend on values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.ops import OpOverload
from ..comm.redistribute import links_of
from ..comm.redistribute import plan_redistribution as plan
from ..errors import InputError
from ..notation import BoundTensor, local_size
from ..ops.drive import JointPieces, Pieces, drive
from ..ops.kernel import Kernel, LocalCall
from ..ops.registry import resolve
from ..ops.resolve import ResolvedOp
from ..sharding.layout import Coordinate, Factor, Layout
from ..sharding.mesh import MeshInfo
from ..sharding.spec import DTensorSpec, TensorMeta
from ..world import rank_int
from .bind_call import Argument, bind_call, operand_layout
from .local_call import drawing, fill, of_rank, on_each, ordered_as, skipping_empty, tensors_in
from .propagate import Decision, KernelCost, ShardingPropagator
from .result_meta import refuse_what_fails


class Constant(NamedTuple):
    """An argument that the plan itself gives: a size as this rank must pass it."""

    value: Any


class Localize:
    """The mark of an argument whose local part is passed as it is."""


LOCALIZE = Localize()
Treatment = Any
"""How an argument is treated: None (as it is), LOCALIZE, a DTensorSpec to bring it to, a Constant, a list of these."""


class CallPlan(NamedTuple):
    """How to carry out a call. `run_local` takes the local arguments and gives the local results."""

    func: OpOverload
    args: tuple[Treatment, ...]
    kwargs: dict[str, Treatment]
    run_local: Callable[..., Any]
    results: Any
    """A spec for each tensor result, in the structure of the results; None where a result is no tensor."""
    writes: tuple[tuple[int | str, int], ...]
    """(argument, result) for each argument that is written: its final spec may differ from the result's."""
    in_place: bool
    """Whether the local op may write straight into the local parts of what it writes."""
    is_view: bool
    local_view: bool
    """Whether views share memory with the local part of what they view: then writes need no care."""
    communication: tuple[str, ...]
    """What is communicated without being asked for, in words."""


# ---- planning -----------------------------------------------------------------------------------------------------


def plan_call(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], registered: ResolvedOp, mesh_info: MeshInfo
) -> CallPlan:
    """The plan of a call whose tensors are given as `Argument`s."""
    return Planner(func, args, kwargs, registered, mesh_info).run()


class Planner:
    """Makes the plan of one call."""

    lists: frozenset[int | str] = frozenset()

    def __init__(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], registered: ResolvedOp, mesh_info: MeshInfo
    ) -> None:
        self.func, self.args, self.kwargs, self.registered, self.mesh_info = func, args, kwargs, registered, mesh_info

    def run(self) -> CallPlan:
        found = bind_call(self.registered, self.args, self.kwargs, self.mesh_info, self.lists)
        self.registered, self.metas, self.bound = found.resolved, found.metas, found.bound
        self.operands, self.operand_places = found.operands, found.places
        self.outputs, self.results, self.written = found.outputs, found.results, found.written
        self.decision = self._choose()
        return self._write_down()

    def _at(self, where: int | str) -> Any:
        return self.args[where] if isinstance(where, int) else self.kwargs.get(where)

    def _choose(self) -> Decision:
        kernels: dict[int, KernelCost] = {}
        for index, factor in enumerate(self.bound.factors):
            if factor.kernel:
                kernel = self._kernel(index)
                kernels[index] = KernelCost(kernel.rounds, kernel.traffic, kernel.joint)
        groups = frozenset(self.mesh_info.groups)
        links = links_of(self.mesh_info)
        arguments = (self.bound, self.operands, self.results, self.mesh_info.sizes, links, kernels, groups)
        return ShardingPropagator(*arguments).choose()

    def _kernel(self, factor: int) -> Kernel:
        return self.registered.kernel(self.bound.factors[factor].name)

    # ---- writing it down ------------------------------------------------------------------------------------

    def _write_down(self) -> CallPlan:
        decision = self.decision
        treatments = dict(zip(self.operand_places, decision.operands, strict=True))
        communication: list[str] = []
        args = tuple(self._treat(i, value, treatments, communication) for i, value in enumerate(self.args))
        kwargs = {n: self._treat(n, value, treatments, communication) for n, value in self.kwargs.items()}
        specs = self._result_specs()
        writes, in_place = self._writes(specs, args, kwargs, communication)
        run = self._local_run(communication)
        is_view = self.registered.is_view
        local_view = is_view and args[0] is LOCALIZE and not self._makes_new()
        if run is not self.func and not writes and not local_view:  # a view in order of its own would be a copy
            run = ordered_as(specs, run)
        in_place = in_place and not self._makes_new()
        results = self._structured(specs)
        return CallPlan(
            self.func,
            args,
            kwargs,
            run,
            results,
            writes,
            in_place,
            is_view,
            local_view,
            tuple(communication),
        )

    def _treat(self, where: int | str, value: Any, layouts: dict[Any, Layout], communication: list[str]) -> Treatment:
        name = self.func._schema.arguments[where].name if isinstance(where, int) else where
        if isinstance(value, Argument):
            return self._treat_tensor(name, value, layouts.get((where, None)), communication)
        if isinstance(value, (list, tuple)) and any(isinstance(element, Argument) for element in value):
            return [
                self._treat_tensor(f"{name}[{i}]", element, layouts.get((where, i)), communication)
                if isinstance(element, Argument)
                else None
                for i, element in enumerate(value)
            ]
        if name in dict(self.bound.size_args) and value is not None:
            return self._local_sizes(name, value)
        return None

    def _treat_tensor(
        self, name: str, argument: Argument, layout: Layout | None, communication: list[str]
    ) -> Treatment:
        if argument.spec is None:
            return None
        if layout is None or layout is operand_layout(self.registered, argument, self.mesh_info.sizes):
            return LOCALIZE
        target = DTensorSpec.from_layout(self.mesh_info, layout, argument.meta)
        steps = plan(argument.spec, target).plan
        if steps.collectives:
            communication.append(f"{name}: {argument.spec!r} -> {target!r}")
        return target if steps.steps else LOCALIZE

    def _local_sizes(self, name: str, value: Any) -> Treatment:
        def sizes_at(at: Coordinate) -> list[int]:
            local = local_size(self.bound, name, value, self.mesh_info.sizes, self.decision.cuts, at)
            return local if isinstance(local, list) else [local]

        given = list(value) if isinstance(value, (list, tuple)) else [value]
        coordinates = self.mesh_info.coordinates if self.mesh_info.simulated else (self.mesh_info.coordinate,)
        by_rank = [sizes_at(at) for at in coordinates]
        if all(sizes == given for sizes in by_rank):
            return None
        local = [rank_int(column) for column in zip(*by_rank, strict=True)] if self.mesh_info.simulated else by_rank[0]
        return Constant(local if isinstance(value, (list, tuple)) else local[0])

    def _result_specs(self) -> list[DTensorSpec]:
        flat = self.outputs if isinstance(self.outputs, (tuple, list)) else (self.outputs,)
        metas = [TensorMeta(t.shape, t.stride(), t.dtype) for t in flat if isinstance(t, Tensor)]
        return [
            DTensorSpec.from_layout(self.mesh_info, layout, meta)
            for layout, meta in zip(self.decision.results, metas, strict=True)
        ]

    def _structured(self, specs: list[DTensorSpec]) -> Any:
        remaining = iter(specs)
        if isinstance(self.outputs, (tuple, list)):
            return type(self.outputs)(next(remaining) if isinstance(t, Tensor) else None for t in self.outputs)
        return next(remaining) if isinstance(self.outputs, Tensor) else None

    def _writes(
        self, specs: list[DTensorSpec], args: Sequence[Any], kwargs: dict[str, Any], communication: list[str]
    ) -> tuple[tuple[tuple[int | str, int], ...], bool]:
        writes = tuple((where, index) for index, where in enumerate(self.written))
        in_place = True
        for where, index in writes:
            written = self._at(where)
            if written.spec is None:
                raise InputError(
                    f"{self.func} would write a distributed result into a plain tensor of shape "
                    f"{list(written.meta.shape)}",
                    "write into a DTensor, or take the result's full_tensor()",
                )
            treatment = args[where] if isinstance(where, int) else kwargs[where]
            in_place = in_place and treatment is LOCALIZE and specs[index].layout is written.spec.layout
            if specs[index].layout is not written.spec.layout:
                steps = plan(specs[index].with_layout(specs[index].layout), written.spec).plan
                if steps.collectives:
                    communication.append(f"result: {specs[index]!r} -> {written.spec!r}")
        return writes, in_place

    def _local_run(self, communication: list[str]) -> Callable[..., Any]:
        """What runs on local arguments: the op, its kernel, or its local implementation; never on empty parts."""
        draw = self.registered.op.draw
        if draw is not None:
            run = on_each(self.mesh_info, self._bind_local_call(None), lambda call, at: draw(call))
            return drawing(run, self.mesh_info, tensors_in(self.outputs)[0])
        local = self.registered.op.local
        layouts = self.decision.results
        for factor in dict.fromkeys(factor for _, factor in self.decision.cuts):
            if self.bound.factors[factor].kernel:
                return self._kernel_run(factor, communication)
        if local is not None and not self._as_the_op():
            return on_each(self.mesh_info, self._bind_local_call(None), lambda call, at: local.run(call))
        if self._may_be_empty():
            dtypes = [t.dtype for t in tensors_in(self.outputs)]
            identities = [fill(layout, dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
            structure = self._structured(list(range(len(layouts))))  # type: ignore[arg-type]
            if self.registered.variant == "functional":
                # Ranks without data do not call the op, so an error that only data shows must show before.
                refuse_what_fails(self.func, *self.metas)
            return skipping_empty(self.func, self.mesh_info, layouts, identities, dtypes, structure)
        return resolve(self.func).python or self.func

    def _as_the_op(self) -> bool:
        """Whether the local implementation would do what the op itself does, here."""
        local = self.registered.op.local
        if local is not None and local.when == "partial sum":
            return not any(layout.partial for layout in self.decision.results)
        return local is not None and local.when == "empty shard" and not self._has_empty_part()

    def _makes_new(self) -> bool:
        """Whether what runs gives new tensors, even for an op that writes: kernels know of no `out=`."""
        cut = any(self.bound.factors[factor].kernel for _, factor in self.decision.cuts)
        op = self.registered.op
        copies = op.local is not None and op.local.copies
        return cut or copies or (self.registered.variant == "out" and (op.local is not None or op.draw is not None))

    def _may_be_empty(self) -> bool:
        if self.registered.op.takes_empty:
            return False
        if self.decision.has_summands:
            return False
        if any(math.prod(operand.tensor.shape) == 0 for operand in self.operands):
            # The op itself knows what comes of nothing, unless that is nothing, too: then no part need be computed.
            return all(math.prod(result.tensor.shape) == 0 for result in self.results)
        return self._has_empty_part()

    def _has_empty_part(self) -> bool:
        """Whether some rank holds nothing of some operand."""
        factors = [factor for layout in self.decision.operands for dim in layout.dims for factor in dim]
        return any(_smallest(self.mesh_info, factor) == 0 for factor in factors)

    def _kernel_run(self, factor: int, communication: list[str]) -> Callable[..., Any]:
        kernel = self._kernel(factor)
        pieces = self._pieces()
        if kernel.rounds:
            communication.append(f"{kernel.rounds} collective(s) inside {self.func} over its cut dim")
        make = self._bind_local_call(factor)

        def run(*args: Any, **kwargs: Any) -> Any:
            def start(at: Coordinate, rank: int) -> Any:
                return kernel.run(make(at, of_rank(args, rank), of_rank(kwargs, rank)), pieces.cut(at))

            return drive(pieces, start)

        return run

    def _pieces(self) -> Pieces:
        """The ranks that a kernel brings together: those that share its factor, or all factors of a joint kernel."""
        cut: dict[int, tuple[int, ...]] = {}
        for axis, factor in self.decision.cuts:
            if self.bound.factors[factor].kernel:
                cut[factor] = (*cut.get(factor, ()), axis)
        factors = [Factor(self.bound.factors[factor].size, axes) for factor, axes in cut.items()]
        return Pieces(self.mesh_info, factors[0]) if len(factors) == 1 else JointPieces(self.mesh_info, factors)

    def _bind_local_call(self, factor: int | None) -> Callable[..., LocalCall]:
        func, layouts = self.func, self.decision.results
        names = [argument.name for argument in func._schema.arguments]
        defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        dims = tuple(_dim_of(operand.tensor, factor) for operand in self.operands)
        out_dims = tuple(_dim_of(result.tensor, factor) for result in self.results)
        shapes = tuple(result.tensor.shape for result in self.results)
        dtypes = tuple(tensor.dtype for tensor in tensors_in(self.outputs))
        given = self.decision.operands

        def make(at: Coordinate, args: Sequence[Any], kwargs: dict[str, Any]) -> LocalCall:
            arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            return LocalCall(func, arguments, dims, out_dims, shapes, dtypes, layouts, at, given)

        return make


# ---- small parts ----------------------------------------------------------------------------------------------------


def _dim_of(tensor: BoundTensor, factor: int | None) -> int | None:
    for dim, factors in enumerate(tensor.dims):
        if factor is not None and factor in factors:
            return dim
    return None


def _smallest(mesh_info: MeshInfo, factor: Factor) -> int:
    """What the rank with the least of a factor holds: the last one along every axis."""
    size = factor.size
    for axis in factor.axes:
        step = -(-size // mesh_info.sizes[axis])
        size = max(0, size - step * (mesh_info.sizes[axis] - 1))
    return size
