"""Extending shardwise: rules for your own ops, and local functions over distributed tensors.

>>> register_sharding(torch.ops.mylib.scale_rows.default, "m n, m -> m n ; linear 0 | 1")
>>> attend = local_map(my_attention, out_placements=[Shard(1)], in_placements=([Shard(1)], [Shard(1)], [Shard(1)]))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._torch import pytree
from ._torch.ops import OpOverload
from .errors import InputError, PlacementError
from .notation import Rule, RuleError, parse, tensor_arguments
from .notation.rule import NO_DIMS
from .ops.call import Call
from .ops.kernel import Kernel
from .ops.registry import register
from .sharding.placement import Partial, Placement, Placements, Shard
from .sharding.spec import normalize_placements
from .tensor.dtensor import DTensor

Row = tuple[Sequence[Placement | None], Sequence[Placement | None]]


# ---- rules -----------------------------------------------------------------------------------------------------------


def register_sharding(
    op: OpOverload | list[OpOverload],
    rule: str | Callable[[Call], str] | None = None,
    *,
    kernels: Mapping[str, Kernel] | None = None,
) -> Any:
    """Give an op its rule, replacing the one it has.

    `rule` is one line in the notation of `shardwise.rules`, or a function of the call that returns one. Without a rule
    this is a decorator for a function in PyTorch's form: it takes the op's arguments and returns
    acceptable `(output placements, input placements)` of one mesh axis.
    """
    ops = op if isinstance(op, list) else [op]
    if rule is not None:
        if isinstance(rule, str):
            for each in ops:
                _check_rule(each, parse(rule))
        for each in ops:
            register(each, rule, kernels)
        return None

    def decorate(rows_of: Callable[..., Sequence[Row]]) -> Callable[..., Sequence[Row]]:
        for each in ops:
            register(each, functools.partial(_rule_from_rows, rows_of))
        return rows_of

    return decorate


def _check_rule(op: OpOverload, rule: Rule) -> None:
    """Refuse a rule that speaks of more or fewer tensors than the op has."""
    operands = sum(not argument.out for argument in tensor_arguments(op))
    if not rule.fits(operands):
        raise RuleError(f"the rule {rule!s} has {len(rule.inputs)} operands, {op} has {operands}", f"see {op._schema}")
    results = sum("Tensor" in str(result.type) for result in op._schema.returns)
    written = sum(argument.write for argument in tensor_arguments(op))
    if len(rule.outputs) not in (results, results or written) and not (results == 0 and rule.outputs == (NO_DIMS,)):
        raise RuleError(f"the rule {rule!s} has {len(rule.outputs)} results, {op} has {results}", f"see {op._schema}")


class _Seen:
    """A tensor as a sharding function sees it."""

    def __init__(self, meta: Any) -> None:
        self.shape, self.dtype, self.ndim = meta.shape, meta.dtype, len(meta.shape)


def _rule_from_rows(rows_of: Callable[..., Sequence[Row]], call: Call) -> str:
    """The one-line rule that rows of placements mean.

    A row with a cut input is a factor, one with Partial inputs a way in which they pass. A row that says neither (a cut
    input and a replicated result, cut and Partial inputs together) is left out: that call is then brought to another.
    """
    named = {argument.name for argument in call.op._schema.arguments if argument.kwarg_only}
    tensors = {argument.name: argument.kind for argument in tensor_arguments(call.op) if not argument.out}
    given = [a.name for a in call.op._schema.arguments if a.name in call.arguments]
    seen = {name: _as_seen(call.arg(name)) if name in tensors else call.arg(name) for name in given}
    keywords = {name: value for name, value in seen.items() if name in named}
    rows = rows_of(*(value for name, value in seen.items() if name not in named), **keywords)
    inputs = _Inputs([name for name in tensors if call.arg(name, None) is not None], call)
    outputs: list[dict[int, str]] = [{} for _ in call.op._schema.returns]
    reduce = [""] * len(outputs)
    for number, (row_outputs, row_inputs) in enumerate(rows):
        if len(row_inputs) != len(given) or len(row_outputs) != len(outputs):
            raise RuleError(
                f"a sharding of {call.op} has {len(row_outputs)} output and {len(row_inputs)} input placements",
                f"give {len(outputs)} and {len(given)}: one for each result and each argument of this call, "
                "None for those that are no tensors",
            )
        by_name = {name: placement for name, placement in zip(given, row_inputs, strict=True) if name in inputs.names}
        if any(isinstance(placement, Shard) for placement in by_name.values()):
            _add_factor(f"f{number}", [by_name[name] for name in inputs.names], row_outputs, inputs, outputs, reduce)
        else:
            inputs.add_passing([by_name[name] for name in inputs.names], row_outputs)
    results = ", ".join(_output_text(dims) for dims in outputs)
    clauses = [f"{word} {' | '.join(sets)}" for word, sets in inputs.passing.items() if sets]
    return " ; ".join([f"{inputs.text()} -> {results}", *clauses, f"reduce {', '.join(op or 'sum' for op in reduce)}"])


def _as_seen(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not hasattr(value, "shape"):
        return [_as_seen(element) for element in value]
    return None if value is None else _Seen(value)


class _Inputs:
    """The operands of a rule in the making: the factor of each dim, and how Partial ones pass."""

    def __init__(self, names: list[str], call: Call) -> None:
        self.names = names
        self.optional = [argument.name for argument in tensor_arguments(call.op) if not argument.out]
        self.dims: list[list[str] | None] = []
        for name in names:
            shape = getattr(call.arg(name), "shape", None)  # a list of tensors has none
            self.dims.append(None if shape is None else ["_"] * len(shape))
        self.passing: dict[str, list[str]] = {"linear": [], "monotone": []}

    def add_passing(self, given: Sequence[Placement | None], results: Sequence[Placement | None]) -> None:
        """A row without cuts: Partial operands that pass together."""
        partial = [placement for placement in given if isinstance(placement, Partial)]
        ops = {placement.reduce_op for placement in (*partial, *results) if isinstance(placement, Partial)}
        if not partial or len(ops) != 1 or not all(isinstance(result, Partial) for result in results):
            return
        word = {"sum": "linear", "avg": "linear"}.get(ops.pop(), "monotone")
        places = [self.optional.index(name) for name in self.names]
        members = "+".join(str(place) for place, p in zip(places, given, strict=True) if isinstance(p, Partial))
        if members not in self.passing[word]:
            self.passing[word].append(members)

    def text(self) -> str:
        """The left side of the rule."""
        by_name = dict(zip(self.names, self.dims, strict=True))
        texts = []
        for name in self.optional:
            dims = by_name.get(name, [])
            texts.append("{_..}" if dims is None else " ".join(dims))
        return ", ".join(texts)


def _add_factor(
    name: str,
    given: Sequence[Placement | None],
    results: Sequence[Placement | None],
    inputs: _Inputs,
    outputs: list[dict[int, str]],
    reduce: list[str],
) -> None:
    """A row with cuts; the first row that names a dim counts."""
    cut = [(dims, p.dim) for dims, p in zip(inputs.dims, given, strict=True) if isinstance(p, Shard)]
    if any(dims is None or dims[dim] != "_" for dims, dim in cut) or any(isinstance(p, Partial) for p in given):
        return
    for i, result in enumerate(results):
        if isinstance(result, Shard):
            if result.dim in outputs[i]:
                return
        elif not isinstance(result, Partial) or reduce[i] not in ("", result.reduce_op):
            return
    for dims, dim in cut:
        assert dims is not None, "lists were refused above"
        dims[dim] = name
    for i, result in enumerate(results):
        if isinstance(result, Shard):
            outputs[i][result.dim] = name
        elif isinstance(result, Partial):
            reduce[i] = result.reduce_op


def _output_text(dims: dict[int, str]) -> str:
    last = max(dims, default=-1)
    return " ".join([dims.get(dim, "_") for dim in range(last + 1)] + ["_.."])


# ---- local functions ----------------------------------------------------------------------------------------------


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: tuple[Placements | None, ...] | None = None,
    in_grad_placements: tuple[Placements | None, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """A function on distributed tensors from one on local tensors. Differentiable.

    Every DTensor argument is given to `func` as its local part, and results become DTensors with `out_placements`
    (one placement list, or a tuple of them for several results; None for results that are no tensors). Arguments must
    have `in_placements`, where given, or are redistributed to them with `redistribute_inputs=True`.
    `in_grad_placements` say how the gradients of the local arguments are cut, if otherwise than the arguments.
    """
    if func is None:
        return functools.partial(  # used as a decorator with arguments
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = pytree.tree_flatten(args)
        mesh = device_mesh or next((value.device_mesh for value in flat if isinstance(value, DTensor)), None)
        for name, given in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if given is not None and len(given) != len(flat):
                raise InputError(f"{len(given)} {name} for {len(flat)} arguments of {func.__name__}", "give one each")
        locals_ = [
            _localized(value, i, in_placements, in_grad_placements, redistribute_inputs, func)
            for i, value in enumerate(flat)
        ]
        result = func(*pytree.tree_unflatten(locals_, tree), **kwargs)
        if not any(isinstance(value, DTensor) for value in flat):
            return result
        assert mesh is not None, "some argument is a DTensor, so there is a mesh"
        return _wrapped_results(result, out_placements, mesh, func)

    return mapped


def _localized(
    value: Any,
    index: int,
    in_placements: tuple[Placements | None, ...] | None,
    in_grad_placements: tuple[Placements | None, ...] | None,
    redistribute_inputs: bool,
    func: Callable[..., Any],
) -> Any:
    if not isinstance(value, DTensor):
        return value
    if in_placements is not None:
        wanted = in_placements[index]
        if wanted is None:
            raise InputError(
                f"argument {index} of {func.__name__} is a DTensor, its in_placements are None", "give them"
            )
        normal, order = normalize_placements(value._spec.mesh_info, wanted, value.dim())
        if (normal, order) != (value.placements, value.shard_order):
            if not redistribute_inputs:
                raise PlacementError(
                    f"argument {index} of {func.__name__} is {value._spec!r}, not {list(normal)}",
                    "redistribute it, or pass redistribute_inputs=True",
                )
            value = value.redistribute(placements=wanted)
    grad_placements = in_grad_placements[index] if in_grad_placements is not None else None
    return value.to_local(grad_placements=grad_placements)


def _wrapped_results(result: Any, out_placements: Any, mesh: DeviceMesh, func: Callable[..., Any]) -> Any:
    flat, tree = pytree.tree_flatten(result)
    single = out_placements is None or not isinstance(out_placements, tuple) or _is_placement_list(out_placements)
    wanted = [out_placements] if single else list(out_placements)
    if len(wanted) != len(flat):
        raise InputError(
            f"{len(wanted)} out_placements for {len(flat)} results of {func.__name__}",
            "give a tuple with one placement list for each result, None for those that are no tensors",
        )
    wrapped = []
    for i, (value, placements) in enumerate(zip(flat, wanted, strict=True)):
        if isinstance(value, Tensor) != (placements is not None):
            kind = "a tensor" if isinstance(value, Tensor) else "no tensor"
            raise InputError(
                f"result {i} of {func.__name__} is {kind}, its out_placements are {placements}", "change them"
            )
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            value = DTensor.from_local(value, mesh, placements)
        wrapped.append(value)
    return pytree.tree_unflatten(wrapped, tree)


def _is_placement_list(value: tuple[Any, ...]) -> bool:
    return bool(value) and all(isinstance(element, Placement) for element in value)
