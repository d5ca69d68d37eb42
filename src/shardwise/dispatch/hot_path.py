"""The hot path: calls whose plan is cached and needs no communication.

A table maps the key of a call to the function to run on the local shards, and the spec to wrap its result with. Calls
that are not in it go to the dispatcher, which enters them once they are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.bindings import binding, types_key
from .._torch.ops import OpOverload
from .._torch.symbols import specialized, symbolic
from .._torch.wrapper import make_wrapper
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..sharding.cache import ENTRY_BYTES
from ..sharding.runtime import Runtime, WorldCache, active_runtime, on_activate
from ..sharding.spec import DTensorSpec, TensorMeta
from .arguments import LOCALIZE, LOCALIZE_LIST, Args, Constant, Kwargs, Treatment
from .call_plan import CallPlan
from .gather_cache import after_list_write, after_source_writes, forget_gathered
from .key import BY_VALUE, Key, argument_keys
from .list_plan import ListPlan
from .observe import LOOKUPS, Lookup, observed
from .writes import count_write

_in_inference_mode = torch.is_inference_mode_enabled
_strided = torch.strided


Finish = Callable[[object, Args], object]
"""(local results, arguments) -> results."""
Ready = tuple[Callable[..., Any], TensorMeta | None, DTensorSpec | None, int | None, Finish | None]
"""The hot-path entry of a planned call: run, meta, spec, offset, finish. A plain tuple, which is unpacked quicker.

run     takes the arguments with local shards in the place of distributed tensors
meta    the `TensorMeta` of the one result; None where `finish` makes the results
spec    its spec, likewise
offset  the storage offset of a view relative to the first argument; None for results that have memory of their own
finish  makes results from local results and arguments; None where `meta` and `spec` describe the result
"""


def _ready_bytes(key: Key, ready: Ready) -> int:
    """Return about how many bytes an entry keeps: its functions and specs, and the elements of lists.

    By tracemalloc, when its plan has been evicted: 3 kB for an op on tensors, 29 kB for one on a list of 325.
    """
    return 12 * ENTRY_BYTES + 96 * sum(len(part) if type(part) is tuple else 1 for part in key)


HOT: WorldCache[Key, Ready] = WorldCache("hot calls", 128 << 20, _ready_bytes)


def _with_hashes(args: Args, kwargs: Kwargs | None) -> tuple[Args, Kwargs | None]:
    """Return the arguments with the compiler's symbolic sizes made hashable; in a simulated world, as numbers."""
    simulated = any(isinstance(v, DTensorBase) and v._spec.mesh_info.simulated for v in pytree.tree_leaves(args))
    return (specialized if simulated else symbolic)((tuple(args), kwargs))


def hot_path(kind: type[DTensorBase], plan_and_run: Callable[..., object]) -> Callable[..., object]:
    """Return the `__torch_dispatch__` of a class: one look-up, the op on the local shards, one wrapper.

    Calls that are not in the table go to `plan_and_run(func, args, kwargs, key)`.
    """
    argument_key, by_value = argument_keys(kind), BY_VALUE
    known: Lookup = {}.get

    def use_table_of(runtime: Runtime) -> None:
        nonlocal known
        known = observed(HOT.of(runtime).recent.get)

    on_activate(use_table_of)
    LOOKUPS.on_change(lambda: use_table_of(active_runtime()))

    def __torch_dispatch__(func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        # The key. Most calls have up to four arguments: for them the comprehensions are written out, which cost a frame
        # each. The registry keeps ops alive, so that an id means one op.
        count = len(args)
        key: Key
        if count == 1:
            (a,) = args
            key = (id(func), a._spec if type(a) is kind else argument_key(a))
        elif count == 2:
            a, b = args
            key = (
                id(func),
                a._spec if type(a) is kind else argument_key(a),
                b._spec if type(b) is kind else argument_key(b),
            )
        elif count == 3:
            a, b, c = args
            key = (
                id(func),
                a._spec if type(a) is kind else argument_key(a),
                b._spec if (t := type(b)) is kind else b if t in by_value else argument_key(b),
                c._spec if (t := type(c)) is kind else c if t in by_value else argument_key(c),
            )
        elif count == 4:
            a, b, c, d = args
            key = (
                id(func),
                a._spec if type(a) is kind else argument_key(a),
                b._spec if (t := type(b)) is kind else b if t in by_value else argument_key(b),
                c._spec if (t := type(c)) is kind else c if t in by_value else argument_key(c),
                d._spec if (t := type(d)) is kind else d if t in by_value else argument_key(d),
            )
        else:
            keys = [v._spec if (t := type(v)) is kind else v if t in by_value else argument_key(v) for v in args]
            key = (id(func), *keys)
        if kwargs:
            key = (*key, *kwargs, *map(argument_key, kwargs.values()))
        try:
            ready = known(key)
        except TypeError:  # the compiler gives sizes as symbols, which have no hash
            return __torch_dispatch__(func, types, *_with_hashes(args, kwargs))
        if ready is None:
            return plan_and_run(func, args, kwargs or {}, key)
        run, meta, spec, offset, finish = ready
        if offset is not None and _in_inference_mode():  # a view of a normal tensor is no inference tensor
            return plan_and_run(func, args, kwargs or {}, key)
        try:
            local_args: Sequence[object]
            if offset is not None:  # a view: of the first argument, which is the only tensor
                a = args[0]
                local_args = (a._shard, *args[1:])
            elif count == 1:
                local_args = (a._shard if type(a) is kind else a,)
            elif count == 2:
                local_args = (a._shard if type(a) is kind else a, b._shard if type(b) is kind else b)
            else:
                local_args = [v._shard if type(v) is kind else v for v in args]
        except AttributeError:  # a shard that comes from a source
            return plan_and_run(func, args, kwargs or {}, key)
        local = run(*local_args, **kwargs) if kwargs else run(*local_args)
        if finish is not None:
            return finish(local, args)
        if offset is not None:
            offset = offset + a.storage_offset() or None
        shape, stride, dtype = meta  # type: ignore[misc]
        tensor = make_wrapper(kind, shape, stride, offset, None, dtype, _strided, local.device)
        tensor._shard = local
        tensor._spec = spec
        return tensor

    return __torch_dispatch__


RETURNING_SHARD: Ready = (lambda shard: shard, None, None, None, lambda shard, args: shard)
"""The hot-path entry of an op that returns the local shard itself."""

# ---- from plans -----------------------------------------------------------------------------------------------------


def ready_call(op: ResolvedOp, plan: CallPlan | ListPlan, args: Args, kwargs: Kwargs, kind: type[Any]) -> Ready | None:
    """Return the hot-path entry of a planned call, or None if every call needs the dispatcher."""
    if plan.communication or op.op.addresses_storage or not _are_known(args, kwargs, kind):
        return None
    if op.op.reads_numbers and any(where in op.number_arguments for where in (*range(len(args)), *kwargs)):
        return None  # the key of the call has the types of numbers
    if isinstance(plan, ListPlan):
        return _ready_list(op, plan, args, kwargs, kind)
    if plan.is_view != plan.local_view or any(plan.kwargs.values()):
        return None
    on_shards = plan.run_local if plan.run_local is not plan.func else _quickest(op, args, kwargs)
    run = _treating(plan.args, on_shards)
    if run is None:
        return None
    if plan.writes:
        finish = _first if op.returns else _nothing
        simple = plan.in_place and plan.writes == ((0, 0),)
        return (run, None, None, None, finish) if simple else None
    if plan.is_view:
        return _ready_view(plan, run, args, kind)
    if type(plan.results) is DTensorSpec:
        return (run, plan.results.tensor_meta, plan.results, None, None)
    if isinstance(plan.results, (tuple, list)):
        return (run, None, None, None, _wrapping(plan.results, kind))
    return None


def _ready_view(plan: CallPlan, run: Callable[..., object], args: Args, kind: type[Any]) -> Ready | None:
    """Return the hot-path entry of a view op."""
    specs, dtype = plan.results, args[0].dtype
    if type(specs) is DTensorSpec and specs.dtype == dtype:
        return (run, specs.tensor_meta, specs, plan.offsets[0], None)
    if isinstance(specs, (tuple, list)) and all(spec.dtype == dtype for spec in specs):
        return (run, None, None, 0, _wrapping_views(specs, plan.offsets, kind))
    return None


def _ready_list(op: ResolvedOp, plan: ListPlan, args: Args, kwargs: Kwargs, kind: type[Any]) -> Ready | None:
    """Return the hot-path entry of an op on lists that runs once on all their elements."""
    if plan.moved or len(plan.groups) != 1 or plan.groups[0][1] is not plan.func:
        return None
    if not all(_is_local(how) for how in (*plan.args, *plan.kwargs.values())):
        return None
    run = _quickest(op, args, kwargs)
    lists = [isinstance(how, list) or how is LOCALIZE_LIST for how in plan.args]
    pure = [listed and all(type(v) is kind for v in value) for listed, value in zip(lists, args, strict=True)]
    written = [where for where in plan.writes if isinstance(where, int)]

    def run_on_lists(*args: Any, **named: object) -> object:
        try:
            local = [
                [v._shard for v in value]
                if all_distributed
                else [v._shard if type(v) is kind else v for v in value]
                if listed
                else value
                for value, listed, all_distributed in zip(args, lists, pure, strict=True)
            ]
        except AttributeError:  # shards that come from a source, to which writes go back
            return run_on_sources(args, named)
        result = run(*local, **named)
        for where in written:
            after_list_write(args[where], local[where])
        return result

    def run_on_sources(args: Args, named: Kwargs) -> object:
        local = [
            [v._local_shard if type(v) is kind else v for v in value] if listed else value
            for value, listed in zip(args, lists, strict=True)
        ]
        result = run(*local, **named)
        for where in written:
            after_source_writes(args[where])
        return result

    finish = _no_results if plan.results is None else _wrapping(list(plan.results), kind)
    return (run_on_lists, None, None, None, finish)


def _is_local(how: Treatment) -> bool:
    if isinstance(how, list):
        return all(map(_is_local, how))
    return how is None or how is LOCALIZE or how is LOCALIZE_LIST


def _are_known(args: Args, kwargs: Kwargs, kind: type[object]) -> bool:
    """Return whether the hot path can handle all arguments."""
    if any(isinstance(value, (Tensor, list, tuple)) for value in kwargs.values()):
        return False
    return all(_is_known(value, kind) for value in args)


def _is_known(value: object, kind: type[object]) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_known(element, kind) for element in value)
    return not isinstance(value, Tensor) or type(value) is kind or (type(value) is Tensor and not value.dim())


def _quickest(op: ResolvedOp, args: Args, kwargs: Kwargs) -> Callable[..., object]:
    """Return the fastest callable of this op for local arguments of these types."""
    if op.python is not None:
        return op.python
    key = types_key(args, kwargs)
    found = op.bindings.get(key)
    if found is None:
        found = op.bindings[key] = binding(op.func, args, kwargs)
    return found


def _treating(treatments: tuple[Treatment, ...], run: Callable[..., object]) -> Callable[..., object] | None:
    """Return `run` with lists and sizes replaced by local ones; None if other treatments are needed."""
    known = {i: how for i, how in enumerate(treatments) if how is not None and how is not LOCALIZE}
    if not known:
        return run
    if all(type(how) is Constant for how in known.values()):
        return _with_constants(run, {i: how.value for i, how in known.items()})
    if list(known) == [0] and isinstance(known[0], list) and all(how is LOCALIZE for how in known[0]):
        return lambda tensors, *rest, **named: run(_shards(tensors), *rest, **named)
    return None


def _shards(tensors: Sequence[DTensorBase]) -> list[Tensor]:
    try:
        return [tensor._shard for tensor in tensors]
    except AttributeError:  # some come from a source
        return [tensor._local_shard for tensor in tensors]


def _with_constants(run: Callable[..., object], constants: dict[int, object]) -> Callable[..., object]:
    if list(constants) == [1]:
        constant = constants[1]
        return lambda first, _, *rest, **named: run(first, constant, *rest, **named)
    return lambda *args, **named: run(*[constants.get(i, value) for i, value in enumerate(args)], **named)


def _no_results(local: object, args: Args) -> None:
    """Finish an op on lists that returns nothing: `run` has done all."""


def _nothing(local: object, args: Args) -> None:
    """Finish an op that writes its first argument and returns nothing."""
    forget_gathered()
    count_write(args[0]._shard)


def _first(local: object, args: Args) -> object:
    """Return the first argument, which was written in place. Its shard was read from the slot, so it has no source."""
    forget_gathered()
    count_write(args[0]._shard)
    return args[0]


def _wrapping_views(specs: Any, offsets: Sequence[int], kind: type[DTensorBase]) -> Callable[[object, Args], object]:
    structure = type(specs)
    views = [(spec, *spec.tensor_meta, behind) for spec, behind in zip(specs, offsets, strict=True)]

    def finish(locals_: Any, args: Args) -> object:
        first, wrapped = args[0], []
        begin, device = first.storage_offset(), first._shard.device
        for local, (spec, shape, stride, dtype, behind) in zip(locals_, views):  # noqa: B905  # strict=True takes time
            tensor = make_wrapper(kind, shape, stride, begin + behind or None, None, dtype, _strided, device)
            tensor._shard = local
            tensor._spec = spec
            wrapped.append(tensor)
        return wrapped if structure is list else tuple(wrapped)

    return finish


def _wrapping(specs: Any, kind: type[DTensorBase]) -> Callable[[object, Args], object]:
    structure = type(specs)

    def finish(locals_: Any, args: Args) -> object:
        wrapped = []
        for local, spec in zip(locals_, specs, strict=True):
            tensor = local
            if spec is not None:  # `kind.wrap(local, spec)`, without the cost of a call
                shape, stride, dtype = spec.tensor_meta
                tensor = make_wrapper(kind, shape, stride, None, None, dtype, _strided, local.device)
                tensor._shard = local
                tensor._spec = spec
            wrapped.append(tensor)
        return wrapped if structure is list else tuple(wrapped)

    return finish
