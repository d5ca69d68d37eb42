"""From an op call on distributed tensors to its result.

hot_path     the key of the call -> a function that runs it, from a table
dispatcher   a miss, or a call that communicates: find or make the plan, carry it out
call_plan    once for each new key: bind the op's rule, choose layouts, decide how to treat every argument
run_call     redistribute what the plan says, run on local shards, wrap
fallback     calls that no rule takes: decomposed, or run on gathered inputs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .._torch.fake_tensors import is_traced
from .._torch.ops import OpOverload
from .._torch.symbols import has_symbols, specialized
from ..errors import MeshError, MixedTensorError
from ..ops.accumulate import ADD_TO_GRAD, SET_GRAD
from ..ops.collectives import communicates
from ..ops.registry import resolve
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..sharding.cache import Cache
from ..sharding.runtime import Runtime, WorldCache, clear_all_caches, on_activate
from .arguments import Args, Kwargs, as_argument, common_mesh, distributed, specialize
from .call_plan import CallPlan, plan_call
from .explicit import refuse_communication
from .fallback import refuse_collective, run_without_plan
from .formulas import hold_result
from .hot_path import HOT, RETURNING_SHARD, Ready, hot_path, ready_call
from .key import Key, argument_keys, plan_key
from .list_plan import ListPlan, plan_list
from .local_strides import FirstRun, makes_results
from .modes import modes
from .outside import is_outside, plan_outside
from .plain import with_numbers, with_replicas
from .plain_targets import write_gathered
from .result_meta import NoRule
from .run_call import run_call
from .run_list import run_list
from .storage import on_storage


class Planned(NamedTuple):
    """The plan of a call (None: no rule takes it), and its hot-path entry (None: every call needs the dispatcher)."""

    op: ResolvedOp
    plan: CallPlan | ListPlan | None
    ready: Ready | None
    outside: bool
    """Whether this rank is not in the mesh."""
    tried: bool = True
    """Whether it is known that local results have the strides of their specs; otherwise the first run finds out."""


def _planned_bytes(key: Key, planned: Planned) -> int:
    plan = planned.plan
    elements = plan.length * len(plan.args) if isinstance(plan, ListPlan) else 0
    return 4096 + 16 * len(key) + 128 * elements


PLANS: WorldCache[Key, Planned] = WorldCache("plans", 64 << 20, _planned_bytes)


class OpDispatcher:
    """Runs ops on distributed tensors of one class. `torch_dispatch` is the `__torch_dispatch__` of the class."""

    plans: Cache[Key, Planned]
    hot: Cache[Key, Ready]

    def __init__(self, kind: type[DTensorBase]) -> None:
        self.kind = kind
        on_activate(self._use_tables_of)
        self.torch_dispatch = hot_path(kind, self.dispatch)
        self._argument_key = argument_keys(kind)
        self._recorded: list[Planned] | None = None

    def _use_tables_of(self, runtime: Runtime) -> None:
        self.plans, self.hot = PLANS.of(runtime), HOT.of(runtime)

    @contextmanager
    def recording(self) -> Iterator[list[Planned]]:
        """Plan all calls anew inside the block, and collect the plans in the list."""
        before, self._recorded = self._recorded, []
        clear_all_caches()
        try:
            yield self._recorded
        finally:
            self._recorded = before

    def dispatch(self, func: OpOverload, args: Args, kwargs: Kwargs, key: Key) -> object:
        """Return the result of a call that is not on the hot path."""
        if func is SET_GRAD or func is ADD_TO_GRAD:
            grad = accumulated(args, kwargs)
            if grad is not None:
                return grad
        op = resolve(func)
        if op.op.returns_shard:
            self.hot[key] = RETURNING_SHARD
            return args[0]._local_shard
        if op.op.addresses_storage and op.in_place_view is None:
            args, kwargs = on_storage(op, args, kwargs), {}
            key = (id(func), *map(self._argument_key, args))
        shared = plan_key(op, key, args, kwargs)
        planned = self.plans.get(shared)
        if planned is None:
            if communicates(func):
                refuse_collective(op, args, kwargs)
            if op.writes and op.decomposition is None:
                result = write_gathered(op, args, kwargs)
                if result is not NotImplemented:
                    return result
            try:
                replicas = with_replicas(op, args, kwargs)
                if replicas is None:
                    planned = self.plans[shared] = self._planned(op, args, kwargs)
            except (MeshError, MixedTensorError):
                numbers = with_numbers(op, args, kwargs)
                if numbers is None:
                    raise
                return func(*numbers[0], **numbers[1])
            if planned is None:
                assert replicas is not None
                result = self.torch_dispatch(func, (), *replicas)
                hold_result(result if op.returns else [replicas[0][position] for position in op.writes])
                return result
        _, plan, ready, outside, tried = planned
        if plan is None:
            return run_without_plan(op, args, kwargs, self.kind, outside)
        if plan.communication and modes.explicit:
            refuse_communication(op, args, kwargs, plan, self.plan)
        if not tried:
            return self._try(planned, args, kwargs, shared, key)
        if ready is not None and key not in self.hot.recent:
            self.hot[key] = ready
        if isinstance(plan, ListPlan):
            return run_list(plan, args, kwargs, self.kind)
        return run_call(plan, args, kwargs, self.kind)

    def _planned(self, op: ResolvedOp, args: Args, kwargs: Kwargs) -> Planned:
        try:
            plan = self.plan(op, args, kwargs)
        except Exception:
            # The rule may need numbers where sizes are symbols. If so, the graph is specialized to these sizes.
            if not specialize(distributed(args, kwargs)) and not has_symbols((args, list(kwargs.values()))):
                raise
            plan = self.plan(op, *specialized((args, kwargs)))
        outside = is_outside(args, kwargs)
        if plan is not None and outside:
            plan = plan_outside(op, plan, args, kwargs)
        tried = outside or not isinstance(plan, CallPlan) or not makes_results(plan)
        ready = ready_call(op, plan, args, kwargs, self.kind) if plan is not None and tried else None
        planned = Planned(op, plan, ready, outside, tried)
        if self._recorded is not None:
            self._recorded.append(planned)
        return planned

    def _try(self, planned: Planned, args: Args, kwargs: Kwargs, shared: Key, key: Key) -> object:
        """Run a plan for the first time, return the result, and make the plan ready for the hot path."""
        op, plan, _, outside, _ = planned
        assert isinstance(plan, CallPlan), "plans of ops on lists count as tried"
        first = FirstRun(plan)
        result = run_call(plan._replace(run_local=first), args, kwargs, self.kind)
        if is_traced():
            return result  # fake tensors have the strides of meta kernels, which prove nothing
        ready = ready_call(op, first.plan, args, kwargs, self.kind)
        self.plans[shared] = Planned(op, first.plan, ready, outside)
        if ready is not None:
            self.hot[key] = ready
        return result

    def plan(self, op: ResolvedOp, args: Args, kwargs: Kwargs) -> CallPlan | ListPlan | None:
        """Return the plan of a call; None to decompose it, or to run it on gathered inputs."""
        try:
            if op.variant == "foreach" and op.has_rule:
                return plan_list(op, args, kwargs)
            if op.op.takes_plain:
                return None
            mesh_info = common_mesh(op.func, distributed(args, kwargs))
            if not op.has_rule or op.in_place_view is not None:
                return None
            named = {name: as_argument(value) for name, value in kwargs.items()}
            return plan_call(op, [as_argument(value) for value in args], named, mesh_info)
        except NoRule:
            return None


def accumulated(args: Args, kwargs: Kwargs) -> DTensorBase | None:
    """Return the result of `detach(gradient)` or `add_(grad, gradient)` if the source of the gradient defers it."""
    gradient = args[-1]
    source = gradient._source if isinstance(gradient, DTensorBase) else None
    if source is None or kwargs:
        return None
    return source.accumulate(gradient, args[0] if len(args) == 2 else None)
