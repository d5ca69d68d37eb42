"""From an op call on distributed tensors to the right answer: one pipeline.

    key the call -> its plan (made once) -> redistribute what the plan says -> run on local parts -> wrap

An op without a rule is taken apart where PyTorch defines it by other ops, and otherwise run whole: its inputs are
gathered, every rank computes the same, and what was written in place goes back to where it came from.

This module works on local tensors and specs; `tensor` hands it its class and the way to wrap a result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.ops import OpOverload
from ..comm.cost import on_change
from ..comm.redistribute import plan as plan_between
from ..comm.redistribute import redistribute_local
from ..errors import CommunicationError, InputError, MeshError, MixedTensorError
from ..ops.inverse import replacing
from ..ops.registry import registry, resolve, rule_for
from ..ops.resolve import ResolvedOp
from ..ops.served import served_by
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec, TensorMeta, contiguous_meta
from .call_plan import LOCALIZE, Argument, CallPlan, Constant, plan_call
from .explicit import redistributions
from .formulas import as_replicated, hold_result, in_formula
from .gather_cache import Last, state_of
from .hot_path import Ready, may_enter, ready, ready_list
from .list_plan import ListPlan, plan_list, run_list
from .modes import modes
from .numbers import with_numbers
from .provenance import record_replicated, taken_as_replicated
from .result_meta import NEEDS_DATA, NoRule

Wrap = Callable[[Tensor, DTensorSpec], Any]
WrapView = Callable[[Tensor, DTensorSpec, Any, "Replay | None"], Any]
_MAX_PLANS = 65536
_UNKNOWN: Any = object()


class GatherWarning(UserWarning):
    """An op has no rule, so its inputs were gathered and it ran whole on every rank."""


class Replay:
    """How a view that is no view of local memory is made again: from its root, by a call, as its index-th result."""

    __slots__ = ("args", "func", "index", "kwargs", "root")

    def __init__(self, root: Any, func: OpOverload, args: Any, kwargs: Any, index: int | None) -> None:
        self.root, self.func, self.args, self.kwargs, self.index = root, func, args, kwargs, index

    def of(self, root: Tensor) -> Any:
        """The view of another root."""
        result = self.func(root, *self.args[1:], **self.kwargs)
        return result if self.index is None else result[self.index]

    def put(self, root: Tensor, value: Tensor) -> Any:
        """The root with this value in the place of the view; None where no op does that."""
        put = replacing(self.func, self.args, self.kwargs, self.index)
        return None if put is None else put(root, value)


class OpDispatcher:
    """Runs ops on distributed tensors of one class."""

    def __init__(self, kind: type[Any], wrap: Wrap, wrap_view: WrapView, written: Callable[[Any], None]) -> None:
        self.kind, self.wrap, self.wrap_view, self.written = kind, wrap, wrap_view, written
        self.plans: dict[Any, CallPlan | ListPlan | None] = {}
        self.hot: dict[Any, Ready] = {}
        on_change(self.plans.clear)
        on_change(self.hot.clear)
        registry.on_change(self.plans.clear)
        registry.on_change(self.hot.clear)

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], hot_key: Any = None) -> Any:
        """The result of the op, wrapped. The hot path comes here with the key of a call that it does not know."""
        if modes.implicit_replication or in_formula():
            replicas = self._with_replicas(func, args, kwargs)
            if replicas is not None:
                result = self._dispatch(func, *replicas, None)
                hold_result(result)
                return result
        return self._dispatch(func, args, kwargs, hot_key)

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], hot_key: Any) -> Any:
        by_type = _BY_TYPE[func]
        for position in _INDICES[func]:
            for index in args[position] if position < len(args) else ():
                if isinstance(index, Tensor) and not isinstance(index, self.kind):
                    record_replicated(index)
        parts = [self._key_of(v, i in by_type) for i, v in enumerate(args)]
        key = (func, *parts, *self._named(kwargs, by_type)) if kwargs else (func, *parts)
        plan = self.plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            try:
                plan = self._plan(func, args, kwargs)
            except (MeshError, MixedTensorError):
                numbers = with_numbers(args, kwargs, self.kind, _written(func, args, kwargs), _reduced)
                if numbers is None:
                    raise
                return func(*numbers[0], **numbers[1])
            if len(self.plans) >= _MAX_PLANS:
                self.plans.clear()
            self.plans[key] = plan
        if plan is None:
            return self._without_rule(func, args, kwargs)
        if plan.communication and modes.explicit:
            self._refuse(func, args, kwargs, plan)
        if hot_key is not None and may_enter(func, args, kwargs, self.kind):
            self._enter(hot_key, plan, args, kwargs)
        if type(plan) is ListPlan:
            return run_list(plan, args, kwargs, _treated, self.kind, self.wrap, self.written)
        return self._run(plan, args, kwargs)

    def _enter(self, key: Any, plan: CallPlan | ListPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the hot path make this call from now on, if it is one of its kind."""
        make = ready_list if isinstance(plan, ListPlan) else ready
        left = make(plan, args, kwargs, self.wrap)  # type: ignore[arg-type]
        if left is not None:
            if len(self.hot) >= _MAX_PLANS:
                self.hot.clear()
            self.hot[key] = left

    def _with_replicas(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with plain tensors as replicated ones, but for those that are written; None if there is none."""
        flat, tree = pytree.tree_flatten((args, kwargs))
        like = next(value for value in flat if isinstance(value, self.kind))
        written = _written(func, args, kwargs)

        def replica(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, self.kind) or not value.dim() or value in written:
                return value
            record_replicated(value)
            return as_replicated(value, like)

        replicas = [replica(value) for value in flat]
        if all(new is old for new, old in zip(replicas, flat, strict=True)):
            return None
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(replicas, tree)
        return found

    # ---- the key ----------------------------------------------------------------------------------------------

    def _named(self, kwargs: dict[str, Any], by_type: frozenset[int | str]) -> list[Any]:
        return [(name, self._key_of(value, name in by_type)) for name, value in kwargs.items()]

    def _key_of(self, value: Any, by_type: bool) -> Any:
        kind = type(value)
        if kind is self.kind:
            return value._spec
        if kind in (list, tuple, torch.Size):
            ours = self.kind
            return tuple([e._spec if type(e) is ours else self._key_of(e, by_type) for e in value])
        if isinstance(value, Tensor):
            if isinstance(value, self.kind):
                return kind, value._spec  # its data must be fetched or made again first: no plan of the hot path
            taken = value.dim() > 0 and taken_as_replicated(value)
            if taken:
                record_replicated(value)
            return tuple(value.shape), value.dtype, taken
        if by_type or kind is torch.Generator:
            return kind
        return kind, value

    # ---- a miss -----------------------------------------------------------------------------------------------

    def _plan(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan | ListPlan | None:
        """The plan of a call, or None where it is taken apart or run whole."""
        registered = rule_for(func)
        if registered is not None and registered.variant == "foreach":
            return self._plan_list(func, args, kwargs, registered)
        mesh_info = common_mesh(func, [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, self.kind)])
        names = [argument.name for argument in func._schema.arguments]
        seen = [self._argument(func, names[i], value) for i, value in enumerate(args)]
        seen_named = {name: self._argument(func, name, value) for name, value in kwargs.items()}
        if registered is None or registered.in_place_view is not None:
            return None
        try:
            return plan_call(func, seen, seen_named, registered, mesh_info)
        except NoRule:
            return None

    def _plan_list(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], registered: ResolvedOp
    ) -> ListPlan | None:
        shared = {a.name for a in func._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")}

        def argument(name: str, value: Any) -> Any:
            if isinstance(value, Tensor) and not isinstance(value, self.kind) and name.partition("[")[0] in shared:
                # What belongs to the whole list (a scale, numbers for each element) is the same on all ranks.
                return Argument(TensorMeta(value.shape, value.stride(), value.dtype), None)
            return self._argument(func, name, value)

        try:
            return plan_list(func, args, kwargs, registered, lambda tensors: common_mesh(func, tensors), argument)
        except NoRule:
            return None

    def _argument(self, func: OpOverload, name: str, value: Any) -> Any:
        if isinstance(value, self.kind):
            return Argument(value._spec.tensor_meta, value._spec)
        if isinstance(value, Tensor):
            if value.dim() > 0 and not taken_as_replicated(value) and not _is_index(func, name):
                raise MixedTensorError(
                    f"{func} mixes distributed tensors with a plain tensor of shape {list(value.shape)}, "
                    f"its argument {name!r}",
                    "make it one with distribute_tensor(tensor, mesh, placements) or DTensor.from_local(...), or take "
                    "plain tensors as replicated inside `with shardwise.experimental.implicit_replication():`",
                )
            return Argument(TensorMeta(value.shape, value.stride(), value.dtype), None)
        if isinstance(value, (list, tuple)):
            return [self._argument(func, f"{name}[{i}]", element) for i, element in enumerate(value)]
        return value

    # ---- a hit ------------------------------------------------------------------------------------------------

    def _run(self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local_args = [_treated(value, how) for value, how in zip(args, plan.args, strict=True)]
        local_kwargs = {name: _treated(value, plan.kwargs[name]) for name, value in kwargs.items()}
        if plan.writes:
            return self._run_writing(plan, args, kwargs, local_args, local_kwargs)
        result = plan.run_local(*local_args, **local_kwargs)
        if plan.is_view:
            return self._wrap_views(plan, result, args, kwargs)
        return self._wrapped(result, plan.results)

    def _wrapped(self, result: Any, specs: Any) -> Any:
        if type(specs) is DTensorSpec:
            return self.wrap(result, specs)
        if isinstance(specs, (tuple, list)):
            return type(specs)([self._wrapped(r, s) for r, s in zip(result, specs, strict=True)])
        return result

    def _wrap_views(self, plan: CallPlan, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = args[0]
        local = plan.local_view and type(base) is self.kind

        def wrap(piece: Tensor, spec: DTensorSpec, index: int | None) -> Any:
            return self.wrap_view(piece, spec, base, None if local else Replay(base, plan.func, args, kwargs, index))

        if type(plan.results) is DTensorSpec:
            return wrap(result, plan.results, None)
        return type(plan.results)([wrap(r, s, i) for i, (r, s) in enumerate(zip(result, plan.results, strict=True))])

    def _run_writing(
        self, plan: CallPlan, args: Any, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]
    ) -> Any:
        targets = [args[where] if isinstance(where, int) else kwargs[where] for where, _ in plan.writes]
        if not plan.in_place:
            # The op writes into copies, which then go to where the targets are.
            for where, _ in plan.writes:
                if isinstance(where, int):
                    local_args[where] = local_args[where].clone()
                else:
                    local_kwargs[where] = local_kwargs[where].new_empty(0)
        result = plan.run_local(*local_args, **local_kwargs)
        returns = bool(plan.func._schema.returns)
        if not returns:
            result = [local_args[where] if isinstance(where, int) else local_kwargs[where] for where, _ in plan.writes]
        if not plan.in_place:
            specs = plan.results if isinstance(plan.results, (tuple, list)) else (plan.results,)
            results = result if isinstance(result, (tuple, list)) else (result,)
            for target, spec, local in zip(targets, specs, results, strict=False):
                if spec.shape != target._spec.shape:
                    raise InputError(
                        f"{plan.func} would change the shape of {target._spec!r}",
                        "write into a tensor of the result's shape",
                    )
                source = spec.with_meta(target._spec.tensor_meta._replace(dtype=spec.dtype))
                goal = target._spec.with_meta(source.tensor_meta)
                target._local_tensor.copy_(redistribute_local(local, source, goal))
        for target in targets:
            self.written(target)
        if not returns:
            return None
        return targets[0] if not isinstance(plan.results, (tuple, list)) else type(plan.results)(targets)

    # ---- without a rule -----------------------------------------------------------------------------------------

    def _without_rule(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        instead = resolve(func).decomposition
        if instead is not None and (result := instead(*args, **kwargs)) is not NotImplemented:
            return result
        as_view = resolve(func).in_place_view
        if as_view is not None:
            args[0].data = as_view(*args, **kwargs)
            return args[0]
        taken_apart = func.decompose(*args, **kwargs)
        if taken_apart is not NotImplemented:
            return taken_apart
        if served_by(func) != "rule" and not NEEDS_DATA & set(func.tags):
            _tell_no_rule(func)
        return self._run_whole(func, args, kwargs)

    def _run_whole(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, tree = pytree.tree_flatten((args, kwargs))
        ours = {id(value): value for value in flat if isinstance(value, self.kind)}
        mesh_info = next(iter(ours.values()))._spec.mesh_info
        written = _written(func, args, kwargs)
        for tensor in written:
            if not isinstance(tensor, self.kind):
                raise InputError(f"{func} would write a distributed result into a plain tensor", "write into a DTensor")
        if modes.explicit:
            self._refuse_moving(func, args, kwargs)
        whole = {key: _gathered(tensor, writable=tensor in written) for key, tensor in ours.items()}
        local_args, local_kwargs = pytree.tree_unflatten([whole.get(id(value), value) for value in flat], tree)
        result = func(*local_args, **local_kwargs)
        for tensor in written:
            if whole[id(tensor)].shape != tensor._spec.shape:
                raise InputError(
                    f"{func} would change the shape of {tensor._spec!r}", "use the op that makes a new tensor"
                )
            new = redistribute_local(whole[id(tensor)], replicated(tensor._spec), tensor._spec)
            tensor._local_tensor.copy_(new)
            self.written(tensor)
        returned = {id(whole[id(tensor)]): tensor for tensor in written}
        position = iter(range(1 << 30))

        def wrap(local: Tensor) -> Any:
            if id(local) in returned:
                return returned[id(local)]
            local, spec = _as_whole(local, mesh_info)
            if not _returns_view(func):
                return self.wrap(local, spec)
            index = None if isinstance(result, Tensor) else next(position)
            return self.wrap_view(local, spec, args[0], Replay(args[0], func, args, kwargs, index))

        return pytree.tree_map_only(Tensor, wrap, result)

    # ---- explicit mode ------------------------------------------------------------------------------------------

    def _refuse(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], plan: CallPlan | ListPlan
    ) -> None:
        """Refuse communication that the user did not ask for."""
        treatments = [*plan.args, *(plan.kwargs[name] for name in kwargs)]
        wanted = [how if type(how) is DTensorSpec else None for how in self._of_tensors(args, kwargs, treatments)]
        raise CommunicationError(
            f"{func} needs communication in explicit mode ({'; '.join(plan.communication)})",
            "redistribute first: " + self._advice(func, args, kwargs, wanted),
        )

    def _refuse_moving(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse to gather the arguments of an op that runs whole."""
        specs = [spec for _, spec in self._named_specs(func, args, kwargs)]
        if _any_moves(specs):
            moving = ", ".join(repr(spec) for spec in specs if _any_moves([spec]))
            raise CommunicationError(
                f"{func} runs whole, which needs {moving} gathered, in explicit mode",
                "redistribute first: " + self._advice(func, args, kwargs, [replicated(spec) for spec in specs]),
            )

    def _advice(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: list[DTensorSpec | None]
    ) -> str:
        flat, tree = pytree.tree_flatten((args, kwargs))

        def communicates(specs: list[DTensorSpec]) -> bool:
            left = iter(specs)
            with_specs = [self.wrap(v._local_tensor, next(left)) if isinstance(v, self.kind) else v for v in flat]
            plan = self._plan(func, *pytree.tree_unflatten(with_specs, tree))
            return _any_moves(specs) if plan is None else bool(plan.communication)

        return "; ".join(redistributions(self._named_specs(func, args, kwargs), wanted, communicates))

    def _named_specs(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, DTensorSpec]]:
        """The distributed arguments by the names in the schema, elements of lists with their index."""
        found = []
        names = [argument.name for argument in func._schema.arguments]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            elements = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
            for index, element in elements:
                if isinstance(element, self.kind):
                    found.append((name if index is None else f"{name}[{index}]", element._spec))
        return found

    def _of_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any], treatments: list[Any]) -> list[Any]:
        """The treatments of the distributed arguments, in the same order."""
        found = []
        for value, how in zip([*args, *kwargs.values()], treatments, strict=True):
            if isinstance(value, self.kind):
                found.append(how)
            elif isinstance(value, (list, tuple)):
                parts = how if isinstance(how, (list, tuple)) else [how] * len(value)
                found += [part for element, part in zip(value, parts, strict=True) if isinstance(element, self.kind)]
        return found


def _treated(value: Any, how: Any) -> Any:
    if how is None:
        return value
    if how is LOCALIZE:
        return value._local_tensor
    if type(how) is DTensorSpec:
        return _moved(value, how)
    if type(how) is Constant:
        return how.value
    return [_treated(element, its) for element, its in zip(value, how, strict=True)]


_last = Last()


def _moved(tensor: Any, target: DTensorSpec) -> Tensor:
    """The local part of a tensor after redistribution. Ops in a row that want the same share it."""
    local, base = tensor._local_tensor, tensor._base
    # Views are made anew for each op; what they view is one tensor.
    root = base if type(base) is type(tensor) else tensor
    told = state_of(tensor, root)
    found = None if told is None else _last.find(root, (tensor._spec, target, told))
    if found is None:
        found = redistribute_local(local, tensor._spec, target)
        if told is not None:
            _last.keep(root, (tensor._spec, target, told), found)
    return found


def _is_index(func: OpOverload, name: str) -> bool:
    """Whether an argument is one of a list of indices. A list in brackets arrives as a plain tensor: x[[0, 2]]."""
    types = {argument.name: str(argument.type) for argument in func._schema.arguments}
    return types.get(name.partition("[")[0]) == "List[Optional[Tensor]]"


class _KeyedByType(dict[OpOverload, frozenset[int | str]]):
    """The arguments whose value no rule reads, so that a changing learning rate does not make a new plan."""

    def __missing__(self, func: OpOverload) -> frozenset[int | str]:
        scalars: set[int | str] = set()
        reads = resolve(func).op.reads_numbers
        for position, argument in enumerate(() if reads else func._schema.arguments):
            if "number" in str(argument.type) or "float" in str(argument.type):
                scalars |= {position, argument.name}
        self[func] = frozenset(scalars)
        return self[func]


_BY_TYPE = _KeyedByType()


class _IndexPositions(dict[OpOverload, tuple[int, ...]]):
    """The arguments that are lists of indices."""

    def __missing__(self, func: OpOverload) -> tuple[int, ...]:
        arguments = enumerate(func._schema.arguments)
        self[func] = tuple(i for i, argument in arguments if str(argument.type) == "List[Optional[Tensor]]")
        return self[func]


_INDICES = _IndexPositions()


class _Written(list[Any]):
    """The tensors an op writes. Membership is by identity, since == on tensors compares values."""

    def __contains__(self, value: object) -> bool:
        return any(value is mine for mine in self)


def replicated(spec: DTensorSpec) -> DTensorSpec:
    """The same tensor, whole on every rank."""
    return DTensorSpec(spec.mesh, (Replicate(),) * len(spec.mesh_info.sizes), spec.tensor_meta)


def _gathered(tensor: Any, writable: bool) -> Tensor:
    local = redistribute_local(tensor._local_tensor, tensor._spec, replicated(tensor._spec))
    return local.clone() if writable and local is tensor._local_tensor else local


def _reduced(tensor: Any) -> Tensor:
    if modes.explicit and tensor._spec.layout.partial:
        raise CommunicationError(
            f"{tensor._spec!r} meets what is not on its mesh, which needs it reduced, in explicit mode",
            "redistribute it first, e.g. x = x.redistribute(placements=[Replicate(), ...])",
        )
    return _gathered(tensor, writable=False)


def _as_whole(local: Tensor, mesh_info: MeshInfo) -> tuple[Tensor, DTensorSpec]:
    local = local.contiguous()
    meta = contiguous_meta(local.shape, local.dtype)
    return local, DTensorSpec(mesh_info.mesh, (Replicate(),) * len(mesh_info.sizes), meta)


def common_mesh(func: OpOverload, tensors: Sequence[Any]) -> MeshInfo:
    """The mesh of all these tensors."""
    views = {tensor._spec.mesh_info for tensor in tensors}
    if len(views) > 1:
        specs = ", ".join(f"{tensor._spec!r} on {tensor._spec.mesh_info!r}" for tensor in tensors)
        raise MeshError(f"{func} on tensors of different meshes: {specs}", "bring them to one mesh first")
    return views.pop()


def _written(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> _Written:
    written = _Written()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(value if isinstance(value, (list, tuple)) else [value])
    return written


def _returns_view(func: OpOverload) -> bool:
    returns = func._schema.returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _tell_no_rule(func: OpOverload) -> None:
    """Say once that an op is run whole, or refuse it where the user asked for that."""
    advice = f'give it a rule: shardwise.register_sharding(torch.ops.{func}, "...")'
    if modes.strict_ops:
        raise CommunicationError(f"{func} has no rule, and strict_ops is on", advice)
    op = resolve(func)
    if not op.warned:
        op.warned = True
        problem = f"{func} has no rule: its inputs are gathered and it runs whole"
        warnings.warn(f"{problem}; {advice}", GatherWarning, stacklevel=2)


def _any_moves(specs: Sequence[DTensorSpec]) -> bool:
    """Whether gathering these takes communication."""
    return any(plan_between(spec, replicated(spec)).plan.collectives for spec in specs)
