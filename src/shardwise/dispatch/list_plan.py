"""Ops on lists of tensors: the optimizers' foreach and fused ops.

Such an op does to every element what another op does to one tensor. Each distinct element is planned once, like a
call of its own; the op then runs once on the local lists, whatever meshes their elements are on. Where an element
cannot join (a reduction of an empty part), it is run apart. Some ops need the whole list to communicate well (`LISTS`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.ops import OpOverload
from ..comm.redistribute import redistribute_local
from ..errors import InputError
from ..ops.drive import Pieces, drive
from ..ops.kernel import LocalCall
from ..ops.op import ListKernel
from ..ops.resolve import ResolvedOp
from ..sharding.layout import Coordinate, Factor, Layout
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec, TensorMeta
from ..world import common
from .bind_call import Argument, element_result
from .call_plan import LOCALIZE, CallPlan, Planner, Treatment
from .local_call import of_rank
from .result_meta import NoRule

Where = int | str
ALL_LOCAL = object()
"""The mark of a list whose local parts are passed as they are."""


class Moved(NamedTuple):
    """An element that is written but not where it lies: the result at `where` goes from one spec to another."""

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
    groups: tuple[tuple[tuple[int, ...], Callable[..., Any]], ...]
    """What runs on which elements."""
    communication: tuple[str, ...]


# ---- planning -------------------------------------------------------------------------------------------------------


class _ElementPlanner(Planner):
    """Plans one element: arguments that are lists are seen as what they hold for it."""

    def __init__(self, lists: frozenset[Where], *args: Any) -> None:
        super().__init__(*args)
        self.lists = lists

    def _structured(self, specs: Any) -> Any:
        made = super()._structured(specs)
        return [made] if specs and isinstance(specs[0], int) else made  # what runs gives lists of one

    def _may_be_empty(self) -> bool:
        # Elementwise ops and updates take empty parts; a reduction must not see one.
        return bool(any(layout.partial for layout in self.decision.results)) and super()._may_be_empty()


class _Lists:
    """The arguments of a call, and the elements of its lists."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        places: dict[Where, Any] = dict(enumerate(args))
        places.update(kwargs)
        schema = {a.name: str(a.type) for a in func._schema.arguments}
        names = [a.name for a in func._schema.arguments]
        self.lists = frozenset(w for w in places if "List[" in schema[names[w] if isinstance(w, int) else w])
        lengths = {len(places[where]) for where in self.lists} - {0}
        if len(lengths) != 1:
            raise InputError(f"{func} on lists of lengths {sorted(lengths)}", "pass lists of one length")
        self.length = lengths.pop()

    def element(self, index: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for one element."""

        def pick(where: Where, value: Any) -> Any:
            return value if where not in self.lists else value[index] if len(value) else None

        return [pick(i, v) for i, v in enumerate(self.args)], {n: pick(n, v) for n, v in self.kwargs.items()}


def plan_list(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    registered: ResolvedOp,
    mesh_info_of: Callable[[Sequence[Any]], MeshInfo],
    argument: Callable[[str, Any], Any],
) -> ListPlan:
    """The plan of an op on lists. `argument` says how planning sees a value, `view_of` which mesh tensors share."""
    lists = _Lists(func, args, kwargs)
    planned: dict[Any, CallPlan | None] = {}
    elements: list[CallPlan | None] = []
    whole = registered.op.list_kernel
    for index in range(lists.length):
        plain_args, plain_kwargs = lists.element(index)
        named = {str(i): v for i, v in enumerate(plain_args)} | plain_kwargs
        if not any(hasattr(value, "_spec") for value in named.values()):
            elements.append(None)
            continue
        mesh_info = mesh_info_of([value for value in named.values() if hasattr(value, "_spec")])
        seen = [argument(f"{func._schema.arguments[i].name}[{index}]", v) for i, v in enumerate(plain_args)]
        seen_named = {name: argument(f"{name}[{index}]", value) for name, value in plain_kwargs.items()}
        key = (*map(_hashable, seen), *((n, _hashable(v)) for n, v in seen_named.items()))
        if key not in planned:
            if whole is not None:
                planned[key] = _without_partial(func, seen, seen_named, mesh_info, lists.lists, whole)
            else:
                planned[key] = _ElementPlanner(lists.lists, func, seen, seen_named, registered, mesh_info).run()
        elements.append(planned[key])
    return _put_together(func, lists, elements, whole)


def _hashable(value: Any) -> Any:
    return (
        value
        if isinstance(value, Argument)
        else (type(value), value)
        if isinstance(value, (int, bool))
        else type(value)
    )


def _put_together(
    func: OpOverload, lists: _Lists, elements: Sequence[CallPlan | None], whole: ListKernel | None
) -> ListPlan:
    def treatments(where: Where) -> Treatment:
        hows = [None if plan is None else _at(plan, where) for plan in elements]
        if where not in lists.lists:
            return next(how for plan, how in zip(elements, hows, strict=True) if plan is not None)
        value = lists.args[where] if isinstance(where, int) else lists.kwargs[where]
        if len(value) and all(how is LOCALIZE for how in hows):
            return ALL_LOCAL
        return hows if len(value) and any(how is not None for how in hows) else None

    for where in (*range(len(lists.args)), *lists.kwargs):
        hows = {id(_at(plan, where)) for plan in elements if plan is not None}
        if where not in lists.lists and len(hows) > 1:
            raise NoRule(f"the elements of {func} want an argument of all of them differently")
    present = [(i, plan) for i, plan in enumerate(elements) if plan is not None]
    writes = tuple(dict.fromkeys(where for _, plan in present for where, _ in plan.writes))
    moved = []
    for i, plan in present:
        specs = plan.results if isinstance(plan.results, (tuple, list)) else (plan.results,)
        if not plan.in_place:
            for where, result in plan.writes:
                target = (lists.args[where] if isinstance(where, int) else lists.kwargs[where])[i]._spec
                moved.append(Moved(where, i, specs[result].with_meta(target.tensor_meta), target))
    results = None if not func._schema.returns else tuple(p.results if p else None for p in elements)
    return ListPlan(
        func=func,
        args=tuple(treatments(i) for i in range(len(lists.args))),
        kwargs={name: treatments(name) for name in lists.kwargs},
        lists=lists.lists,
        length=lists.length,
        results=results,
        writes=writes,
        moved=tuple(moved),
        groups=_groups(func, elements, whole),
        communication=tuple(itertools.chain.from_iterable(plan.communication for _, plan in present)),
    )


def _at(plan: CallPlan, where: Where) -> Treatment:
    return plan.args[where] if isinstance(where, int) else plan.kwargs[where]


def _groups(
    func: OpOverload, elements: Sequence[CallPlan | None], whole: ListKernel | None
) -> tuple[tuple[tuple[int, ...], Callable[..., Any]], ...]:
    if whole is not None:
        by_run: dict[Any, list[int]] = {}
        for i, plan in enumerate(elements):
            by_run.setdefault(func if plan is None else plan.run_local, []).append(i)
        return tuple((tuple(indices), run) for run, indices in by_run.items())
    together = tuple(i for i, plan in enumerate(elements) if plan is None or plan.run_local is plan.func)
    apart = [((i,), _of_one(plan)) for i, plan in enumerate(elements) if plan is not None and i not in together]
    return (((together, func),) if together else ()) + tuple(apart)


def _of_one(plan: CallPlan) -> Callable[..., Any]:
    """What runs on one element, for lists of one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = plan.run_local(*args, **kwargs)
        return result if isinstance(result, (tuple, list)) else [result]

    return run


# ---- ops that take lists as a whole ---------------------------------------------------------------------------------


def _without_partial(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mesh_info: MeshInfo,
    lists: frozenset[Where],
    kernel: ListKernel,
) -> CallPlan:
    """An element that stays cut as it is, once it is reduced; the kernel does the rest."""
    communication: list[str] = []
    axes: set[int] = set(range(len(mesh_info.sizes))) if kernel.whole_mesh else set()

    def treat(name: str, value: Any) -> Treatment:
        if not isinstance(value, Argument) or value.spec is None:
            return None
        layout = value.spec.layout
        axes.update(axis for dim in layout.dims for factor in dim for axis in factor.axes)
        if not layout.partial:
            return LOCALIZE
        target = DTensorSpec.from_layout(mesh_info, layout.without_partial(), value.meta)
        communication.append(f"{name}: {value.spec!r} -> {target!r}")
        return target

    names = [a.name for a in func._schema.arguments]
    treated = tuple(treat(names[i], value) for i, value in enumerate(args))
    treated_named = {name: treat(name, value) for name, value in kwargs.items()}
    metas = [a.meta if isinstance(a, Argument) else a for a in args]
    named_metas = {n: a.meta if isinstance(a, Argument) else a for n, a in kwargs.items()}
    result = None
    if func._schema.returns:
        out = element_result(func, metas, named_metas, lists)
        result = DTensorSpec(
            mesh_info.mesh, (Replicate(),) * len(mesh_info.sizes), TensorMeta(out.shape, out.stride(), out.dtype)
        )
    writes = tuple(
        (i, 0)
        for i, value in enumerate(args)
        if func._schema.arguments[i].alias_info is not None and isinstance(value, Argument) and value.spec is not None
    )
    in_place = all(treated[i] is LOCALIZE for i, _ in writes)
    results = result if result is not None else tuple(treated_spec(args[i], treated[i]) for i, _ in writes)
    talking = tuple(sorted(axes))
    if talking:
        communication.append(f"1 collective inside {func}")
    run = _list_run(func, mesh_info, talking, kernel) if talking else func
    return CallPlan(
        func=func,
        args=treated,
        kwargs=treated_named,
        run_local=run,
        results=results,
        writes=writes,
        in_place=in_place,
        is_view=False,
        local_view=False,
        communication=tuple(communication),
    )


def treated_spec(argument: Argument, how: Treatment) -> Any:
    """The spec that an argument has in the local call."""
    return argument.spec if how is LOCALIZE else how


_RUNS: dict[Any, Callable[..., Any]] = {}


def _list_run(func: OpOverload, mesh_info: MeshInfo, axes: tuple[int, ...], kernel: ListKernel) -> Callable[..., Any]:
    """The kernel over these axes; the same function for the same axes, so that elements are run together."""
    found = _RUNS.get((func, mesh_info, axes))
    if found is not None:
        return found
    size = 1
    for axis in axes:
        size *= mesh_info.sizes[axis]
    pieces = Pieces(mesh_info, Factor(size, axes))
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    nowhere: tuple[Layout, ...] = ()

    def run(*args: Any, **kwargs: Any) -> Any:
        def start(at: Coordinate, rank: int) -> Any:
            arguments = {**defaults, **dict(zip(names, of_rank(args, rank), strict=False)), **of_rank(kwargs, rank)}
            return kernel.run(LocalCall(func, arguments, (), (), (), (), nowhere, at), pieces.cut(at))

        return drive(pieces, start)

    return _RUNS.setdefault((func, mesh_info, axes), run)


# ---- running --------------------------------------------------------------------------------------------------------


def run_list(
    plan: ListPlan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    treated: Callable[[Any, Treatment], Any],
    kind: type[Any],
    wrap: Callable[[Tensor, DTensorSpec], Any],
    written: Callable[[Any], None],
) -> Any:
    """Carry out a plan."""
    local: dict[Where, Any] = {}
    for i, value in enumerate(args):
        how = plan.args[i]
        local[i] = [t._local_tensor for t in value] if how is ALL_LOCAL else treated(value, how)
    for name, value in kwargs.items():
        how = plan.kwargs[name]
        local[name] = [t._local_tensor for t in value] if how is ALL_LOCAL else treated(value, how)
    for where, index, _, _ in plan.moved:
        local[where][index] = local[where][index].clone()
    results: list[Any] = [None] * plan.length
    for indices, run in plan.groups:
        here = local if len(indices) == plan.length else _picked(plan, local, indices)
        found = run(*(here[i] for i in range(len(args))), **{name: here[name] for name in kwargs})
        if isinstance(found, dict):
            for name, value in found.items():
                _given(plan, args, kwargs, name).copy_(common(value))
        elif plan.results is not None:
            for index, value in zip(indices, found, strict=True):
                results[index] = value
    for where, index, source, target in plan.moved:
        owner = (args[where] if isinstance(where, int) else kwargs[where])[index]
        owner._local_tensor.copy_(redistribute_local(local[where][index], source, target))
    for where in plan.writes:
        for tensor in args[where] if isinstance(where, int) else kwargs[where]:
            if type(tensor) is not kind and isinstance(tensor, kind):  # views, which know what they view
                written(tensor)
    if plan.results is None:
        return None
    return [value if spec is None else wrap(value, spec) for value, spec in zip(results, plan.results, strict=True)]


def _picked(plan: ListPlan, local: Mapping[Where, Any], indices: Sequence[int]) -> dict[Where, Any]:
    return {
        where: [value[i] for i in indices] if where in plan.lists and len(value) else value
        for where, value in local.items()
    }


def _given(plan: ListPlan, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Tensor:
    names = [argument.name for argument in plan.func._schema.arguments]
    return kwargs[name] if name in kwargs else args[names.index(name)]
