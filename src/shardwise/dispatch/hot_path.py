"""The hot path: what a call costs whose plan is known and that needs no communication.

A table maps a cheap key of a call to all that is left to do: run this on the local parts, wrap the result so. Calls
that it does not hold go to the dispatcher, which enters them once they are planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.bindings import binding, types_key
from .._torch.ops import OpOverload
from ..ops.registry import resolve
from ..sharding.spec import DTensorSpec, TensorMeta
from .call_plan import LOCALIZE, CallPlan, Constant, Treatment
from .list_plan import ALL_LOCAL, ListPlan

_make_wrapper = torch.Tensor._make_wrapper_subclass
_in_inference_mode = torch.is_inference_mode_enabled
_strided = torch.strided


Wrap = Callable[[Tensor, DTensorSpec], Any]


class Ready(NamedTuple):
    """What is left of a planned call."""

    run: Callable[..., Any]
    """Takes the arguments with local parts in the place of distributed tensors."""
    meta: TensorMeta | None
    spec: DTensorSpec | None
    """Of the one result; None where `finish` says what becomes of the results."""
    is_view: bool
    finish: Callable[[Any, tuple[Any, ...]], Any] | None
    """(local results, arguments) -> results."""


def hot_path(kind: type[Any], calls: dict[Any, Ready], plan_and_run: Callable[..., Any]) -> Callable[..., Any]:
    """`__torch_dispatch__` of a class of distributed tensors.

    One look-up, the op on the local parts, one wrapper: whatever can be done once is done in planning.
    """
    known = calls.get

    def key_of(value: Any) -> Any:
        """An argument as the key sees it. Its type in the schema is fixed, but for numbers: 1 is not True, nor 1.0."""
        its = type(value)
        if its in _BY_VALUE:
            return value
        if its is list or its is tuple:
            return list_key(value)
        if its is float or its is torch.Generator:
            return its  # no rule reads it: a changing learning rate makes no new plan
        if its is bool:
            return its, value
        if isinstance(value, Tensor):
            # A number in a tensor is the same on all ranks. Others are the dispatcher's: no key is like this one.
            return value.dtype if its is Tensor and not value.dim() else object()
        return object() if its in _UNHASHABLE else value

    def list_key(values: Any) -> Any:
        first = type(values[0]) if values else None
        if first is int:
            return tuple(values)
        if first is float:
            return tuple(map(type, values))
        return tuple([v._spec if type(v) is kind else key_of(v) for v in values])

    def __torch_dispatch__(
        func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        key = (id(func), *[v._spec if type(v) is kind else key_of(v) for v in args])
        if kwargs:
            key = (*key, *kwargs, *map(key_of, kwargs.values()))
        ready = known(key)
        if ready is None:
            return plan_and_run(func, args, kwargs or {}, key)
        run, meta, spec, is_view, finish = ready
        if is_view and _in_inference_mode():  # a view of a normal tensor is none of inference mode
            return plan_and_run(func, args, kwargs or {}, key)
        local_args = [v._local_tensor if type(v) is kind else v for v in args]
        local = run(*local_args, **kwargs) if kwargs else run(*local_args)
        if finish is not None:
            return finish(local, args)
        shape, stride, dtype = meta  # type: ignore[misc]
        tensor = _make_wrapper(kind, shape, stride, None, None, dtype, _strided, local.device)
        tensor._local_tensor = local
        tensor._spec = spec
        return tensor

    return __torch_dispatch__


_BY_VALUE = frozenset((int, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format))
_UNHASHABLE = (torch.SymInt, torch.SymFloat, torch.SymBool, dict)


def quickest(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What calls this op quickest with local arguments of these types."""
    op = resolve(func)
    if op.python is not None:
        return op.python
    key = types_key(args, kwargs)
    found = op.bindings.get(key)
    if found is None:
        found = op.bindings[key] = binding(func, args, kwargs)
    return found


# ---- from plans -----------------------------------------------------------------------------------------------------


def ready(plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Wrap) -> Ready | None:
    """What is left of a planned call without communication; None where the dispatcher has more to do."""
    if plan.communication or plan.is_view != plan.local_view or any(plan.kwargs.values()):
        return None
    on_parts = plan.run_local if plan.run_local is not plan.func else quickest(plan.func, args, kwargs)
    run = _treating(plan.args, on_parts)
    if run is None:
        return None
    if plan.writes:
        finish = _first if plan.func._schema.returns else _nothing
        return Ready(run, None, None, False, finish) if plan.in_place and plan.writes == ((0, 0),) else None
    if type(plan.results) is DTensorSpec:
        return Ready(run, plan.results.tensor_meta, plan.results, plan.is_view, None)
    if isinstance(plan.results, (tuple, list)):
        return Ready(run, None, None, plan.is_view, _wrapping(plan.results, wrap))
    return None


def ready_list(plan: ListPlan, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Wrap) -> Ready | None:
    """The same for an op on lists, where it runs once on all their elements."""
    lists = [isinstance(how, list) or how is ALL_LOCAL for how in plan.args]
    as_they_are = all(_is_local(how) for how in (*plan.args, *plan.kwargs.values()))
    if plan.communication or plan.moved or len(plan.groups) != 1 or plan.groups[0][1] is not plan.func:
        return None
    if not as_they_are:
        return None
    run = quickest(plan.func, args, kwargs)

    def run_on_lists(*args: Any, **named: Any) -> Any:
        local = [
            [getattr(v, "_local_tensor", v) for v in value] if listed else value
            for value, listed in zip(args, lists, strict=True)
        ]
        return run(*local, **named)

    finish = _nothing if plan.results is None else _wrapping(list(plan.results), wrap)
    return Ready(run_on_lists, None, None, False, finish)


def _is_local(how: Treatment) -> bool:
    return how is None or how is LOCALIZE or how is ALL_LOCAL or (isinstance(how, list) and all(map(_is_local, how)))


def _treating(treatments: tuple[Treatment, ...], run: Callable[..., Any]) -> Callable[..., Any] | None:
    """What runs on arguments whose tensors are local parts already: lists, and sizes, are still to be treated."""
    known = {i: how for i, how in enumerate(treatments) if how is not None and how is not LOCALIZE}
    if not known:
        return run
    if all(type(how) is Constant for how in known.values()):
        return _with_constants(run, {i: how.value for i, how in known.items()})
    if list(known) == [0] and isinstance(known[0], list) and all(how is LOCALIZE for how in known[0]):
        return lambda tensors, *rest, **named: run([tensor._local_tensor for tensor in tensors], *rest, **named)
    return None


def _with_constants(run: Callable[..., Any], constants: dict[int, Any]) -> Callable[..., Any]:
    if list(constants) == [1]:
        constant = constants[1]
        return lambda first, _, *rest, **named: run(first, constant, *rest, **named)
    return lambda *args, **named: run(*[constants.get(i, value) for i, value in enumerate(args)], **named)


def _nothing(local: Any, args: tuple[Any, ...]) -> None:
    """An op that returns nothing."""


def _first(local: Any, args: tuple[Any, ...]) -> Any:
    """What was written in place is the result."""
    return args[0]


def _wrapping(specs: Any, wrap: Wrap) -> Callable[[Any, tuple[Any, ...]], Any]:
    structure = type(specs)

    def finish(locals_: Any, args: tuple[Any, ...]) -> Any:
        wrapped = [x if spec is None else wrap(x, spec) for x, spec in zip(locals_, specs, strict=True)]
        return wrapped if structure is list else tuple(wrapped)

    return finish


def may_enter(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Any]) -> bool:
    """Whether a call has arguments that the hot path knows how to treat."""
    if resolve(func).op.reads_numbers or any(isinstance(value, (Tensor, list, tuple)) for value in kwargs.values()):
        return False
    return all(_is_known(value, kind) for value in args)


def _is_known(value: Any, kind: type[Any]) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_known(element, kind) for element in value)
    return not isinstance(value, Tensor) or type(value) is kind or (type(value) is Tensor and not value.dim())
