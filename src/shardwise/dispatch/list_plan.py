"""Plans of ops on lists of tensors: the optimizers' foreach and fused ops.

Such an op does to every element what another op does to one tensor. Each distinct element is planned once, like a
call of its own; the op then runs once on the local lists, whatever meshes their elements are on. An element that needs
other local code (a reduction of an empty shard) runs separately. Some ops communicate once for the list
(`Op.list_kernel`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._torch.ops import OpOverload, schema_of
from ..errors import InputError
from ..ops.call import is_ordinary
from ..ops.drive import Pieces, drive
from ..ops.kernel import KernelRun, LocalCall
from ..ops.op import ListKernel
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..sharding.layout import Coordinate, Factor
from ..sharding.memory_order import meta_of
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Replicate
from ..sharding.runtime import WorldState
from ..sharding.spec import DTensorSpec
from .arguments import LOCALIZE, LOCALIZE_LIST, Args, Argument, Kwargs, Treatment, Where, as_argument, common_mesh
from .bind_call import element_result
from .call_plan import CallPlan, plan_call
from .local_call import of_rank
from .local_code import LocalRun
from .result_meta import NoRule


class Moved(NamedTuple):
    """An element that is not written in place: the result at `where` is redistributed from one spec to another."""

    where: Where
    element: int
    source: DTensorSpec
    target: DTensorSpec


class ListPlan(NamedTuple):
    """How to carry out an op on lists. Treatments are as in a `CallPlan`, one for each element of a list."""

    func: OpOverload
    args: tuple[Treatment, ...]
    kwargs: dict[str, Treatment]
    lists: frozenset[Where]
    length: int
    results: tuple[DTensorSpec | None, ...] | None
    """A spec for each element of the result; None where the op returns nothing."""
    writes: tuple[Where, ...]
    moved: tuple[Moved, ...]
    groups: tuple[tuple[tuple[int, ...], LocalRun], ...]
    """(elements, what runs on their local lists): one group for most ops."""
    communication: tuple[str, ...]


class _Lists:
    """The arguments of a call, and the elements of its lists."""

    def __init__(self, op: ResolvedOp, args: Args, kwargs: Kwargs) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        places: dict[Where, Any] = dict(enumerate(args))
        places.update(kwargs)
        types = {argument.name: str(argument.type) for argument in schema_of(op.func).arguments}
        self.lists = frozenset(w for w in places if "List[" in types[op.names[w] if isinstance(w, int) else w])
        lengths = {len(places[where]) for where in self.lists} - {0}
        if len(lengths) != 1:
            names = {where: op.names[where] if isinstance(where, int) else where for where in places}
            found = ", ".join(f"{len(places[where])} in {names[where]}" for where in places if where in self.lists)
            raise InputError(
                f"{op.func} takes lists of one length, and got lists of {found}",
                "pass as many tensors in each list",
            )
        self.length = lengths.pop()

    def element(self, index: int) -> tuple[list[object], Kwargs]:
        """Return the arguments for one element."""

        def pick(where: Where, value: Any) -> object:
            return value if where not in self.lists else value[index] if len(value) else None

        return [pick(i, v) for i, v in enumerate(self.args)], {n: pick(n, v) for n, v in self.kwargs.items()}


def plan_list(op: ResolvedOp, args: Args, kwargs: Kwargs) -> ListPlan:
    """Return the plan of an op on lists."""
    lists = _Lists(op, args, kwargs)
    planned: dict[object, CallPlan] = {}
    elements: list[CallPlan | None] = []
    for index in range(lists.length):
        its_args, its_kwargs = lists.element(index)
        tensors = [value for value in (*its_args, *its_kwargs.values()) if isinstance(value, DTensorBase)]
        if not tensors:
            elements.append(None)
            continue
        mesh_info = common_mesh(op.func, tensors)
        seen = [as_argument(value) for value in its_args]
        seen_named = {name: as_argument(value) for name, value in its_kwargs.items()}
        key = (*map(_hashable, seen), *((name, _hashable(value)) for name, value in seen_named.items()))
        if key not in planned:
            if op.op.list_kernel is not None:
                planned[key] = _plan_for_kernel(op, op.op.list_kernel, seen, seen_named, mesh_info, lists.lists)
            else:
                planned[key] = plan_call(op, seen, seen_named, mesh_info, lists.lists)
        elements.append(planned[key])
    return _join(lists, elements)


def _hashable(value: object) -> object:
    if isinstance(value, Argument):
        return value
    if isinstance(value, (float, complex)):
        return type(value) if is_ordinary(value) else (type(value), repr(value))
    return (type(value), value) if isinstance(value, int) else type(value)


# ---- from plans of elements to the plan of the list -----------------------------------------------------------------


def _join(lists: _Lists, elements: Sequence[CallPlan | None]) -> ListPlan:
    func = lists.op.func
    present = [(i, plan) for i, plan in enumerate(elements) if plan is not None]
    for where in (*range(len(lists.args)), *lists.kwargs):
        if where not in lists.lists and len({id(_at(plan, where)) for _, plan in present}) > 1:
            raise NoRule(f"the elements of {func} have different treatments of an argument that they share")
    return ListPlan(
        func=func,
        args=tuple(_treatment(lists, elements, i) for i in range(len(lists.args))),
        kwargs={name: _treatment(lists, elements, name) for name in lists.kwargs},
        lists=lists.lists,
        length=lists.length,
        results=tuple(plan.results if plan else None for plan in elements) if lists.op.returns else None,
        writes=tuple(dict.fromkeys(where for _, plan in present for where, _ in plan.writes)),
        moved=tuple(_moved_elements(lists, present)),
        groups=_groups(lists.op, elements),
        communication=tuple(itertools.chain.from_iterable(plan.communication for _, plan in present)),
    )


def _at(plan: CallPlan, where: Where) -> Treatment:
    return plan.args[where] if isinstance(where, int) else plan.kwargs[where]


def _treatment(lists: _Lists, elements: Sequence[CallPlan | None], where: Where) -> Treatment:
    """Return the treatment of the list at `where`, or of an argument that all elements share."""
    hows = [None if plan is None else _at(plan, where) for plan in elements]
    if where not in lists.lists:
        return next(how for plan, how in zip(elements, hows, strict=True) if plan is not None)
    value = lists.args[where] if isinstance(where, int) else lists.kwargs[where]
    if len(value) and all(how is LOCALIZE for how in hows):
        return LOCALIZE_LIST
    return hows if len(value) and any(how is not None for how in hows) else None


def _moved_elements(lists: _Lists, present: Sequence[tuple[int, CallPlan]]) -> list[Moved]:
    moved = []
    for i, plan in present:
        specs = plan.results if isinstance(plan.results, (tuple, list)) else (plan.results,)
        for where, result in () if plan.in_place else plan.writes:
            target = (lists.args[where] if isinstance(where, int) else lists.kwargs[where])[i]._spec
            moved.append(Moved(where, i, specs[result].with_meta(target.tensor_meta), target))
    return moved


def _groups(op: ResolvedOp, elements: Sequence[CallPlan | None]) -> tuple[tuple[tuple[int, ...], LocalRun], ...]:
    if op.op.list_kernel is not None:
        by_run: dict[LocalRun, list[int]] = {}
        for i, plan in enumerate(elements):
            by_run.setdefault(op.func if plan is None else plan.run_local, []).append(i)
        return tuple((tuple(indices), run) for run, indices in by_run.items())
    together = tuple(i for i, plan in enumerate(elements) if plan is None or plan.run_local is plan.func)
    apart = [((i,), _of_one(plan)) for i, plan in enumerate(elements) if plan is not None and i not in together]
    return (((together, op.func),) if together else ()) + tuple(apart)


def _of_one(plan: CallPlan) -> LocalRun:
    """Return the local code of an element, which returns a list of one result."""

    def run(*args: object, **kwargs: object) -> object:
        result = plan.run_local(*args, **kwargs)
        return result if isinstance(result, (tuple, list)) else [result]

    return run


# ---- kernels for lists ----------------------------------------------------------------------------------------------


def _plan_for_kernel(
    op: ResolvedOp,
    kernel: ListKernel,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    mesh_info: MeshInfo,
    lists: frozenset[Where],
) -> CallPlan:
    """Return the plan of an element for a list kernel: sharded as before, with Partial values reduced."""
    communication: list[str] = []
    axes: set[int] = set(range(len(mesh_info.sizes))) if kernel.all_ranks else set()

    def treat(name: str, value: object) -> Treatment:
        if not isinstance(value, Argument) or value.spec is None:
            return None
        layout = value.spec.layout
        axes.update(axis for dim in layout.dims for factor in dim for axis in factor.axes)
        if not layout.partial:
            return LOCALIZE
        target = DTensorSpec.from_layout(mesh_info, layout.without_partial(), value.meta)
        communication.append(f"{name}: {value.spec!r} -> {target!r}")
        return target

    treated = tuple(treat(op.names[i], value) for i, value in enumerate(args))
    treated_named = {name: treat(name, value) for name, value in kwargs.items()}
    written = [i for i in op.writes if isinstance(args[i], Argument) and args[i].spec is not None]
    if op.returns:
        metas = [_meta(value) for value in args], {name: _meta(value) for name, value in kwargs.items()}
        out = element_result(op.func, *metas, lists)
        replicated = (Replicate(),) * len(mesh_info.sizes)
        results: object = DTensorSpec(mesh_info.mesh, replicated, meta_of(out))
    else:
        results = tuple(args[i].spec if treated[i] is LOCALIZE else treated[i] for i in written)
    sharding_axes = tuple(sorted(axes))
    if sharding_axes:
        communication.append(f"1 collective inside {op.func}")
    return CallPlan(
        func=op.func,
        args=treated,
        kwargs=treated_named,
        run_local=_kernel_run(op, kernel, mesh_info, sharding_axes) if sharding_axes else op.func,
        results=results,
        writes=tuple((i, 0) for i in written),
        in_place=all(treated[i] is LOCALIZE for i in written),
        is_view=False,
        local_view=False,
        offsets=(),
        communication=tuple(communication),
    )


def _meta(value: object) -> object:
    return value.meta if isinstance(value, Argument) else value


KERNEL_RUNS: WorldState[dict[tuple[ListKernel, MeshInfo, tuple[int, ...]], LocalRun]] = WorldState(dict)
"""The functions that `_kernel_run` has returned."""


def _kernel_run(op: ResolvedOp, kernel: ListKernel, mesh_info: MeshInfo, axes: tuple[int, ...]) -> LocalRun:
    """Return the kernel over these axes, the same function for the same axes, so that their elements run together."""
    runs = KERNEL_RUNS.of(mesh_info.runtime)
    found = runs.get((kernel, mesh_info, axes))
    if found is None:
        found = runs[kernel, mesh_info, axes] = _make_kernel_run(op, kernel, mesh_info, axes)
    return found


def _make_kernel_run(op: ResolvedOp, kernel: ListKernel, mesh_info: MeshInfo, axes: tuple[int, ...]) -> LocalRun:
    pieces = Pieces(mesh_info, Factor(math.prod(mesh_info.sizes[axis] for axis in axes), axes))

    def run(*args: object, **kwargs: object) -> object:
        def start(at: Coordinate, rank: int) -> KernelRun:
            arguments = op.arguments(of_rank(args, rank), of_rank(kwargs, rank))
            return kernel.run(LocalCall(op.func, arguments, (), (), (), (), (), at), pieces.shard(at))

        return drive(pieces, start)

    return run
