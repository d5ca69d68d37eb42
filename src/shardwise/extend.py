"""Extending shardwise: rules for your own ops, and local functions over distributed tensors.

>>> register_sharding(torch.ops.mylib.scale_rows.default, "m n, m -> m n ; linear 0 | 1")
>>> attend = local_map(my_attention, out_placements=[Shard(1)], in_placements=([Shard(1)], [Shard(1)], [Shard(1)]))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .errors import InputError, PlacementError
from .kernels.requests import Kernel
from .placement import Partial, Placement, Placements, Shard
from .rules import Call, register, tensor_arguments
from .spec import normalize_placements
from .tensor import DTensor

Row = tuple[Sequence[Placement | None], Sequence[Placement | None]]


# ---- rules ------------------------------------------------------------------------------------------------------------


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
        for each in ops:
            register(each, rule, kernels)
        _forget_plans()
        return None

    def decorate(rows_of: Callable[..., Sequence[Row]]) -> Callable[..., Sequence[Row]]:
        for each in ops:
            register(each, functools.partial(_rule_from_rows, rows_of))
        _forget_plans()
        return rows_of

    return decorate


def _forget_plans() -> None:
    DTensor._op_dispatcher.plans.clear()


class _Seen:
    """A tensor as a sharding function sees it."""

    def __init__(self, meta: Any) -> None:
        self.shape, self.dtype, self.ndim = meta.shape, meta.dtype, len(meta.shape)


def _rule_from_rows(rows_of: Callable[..., Sequence[Row]], call: Call) -> str:
    """The one-line rule that rows of placements mean: each row with a cut input is a factor."""
    schema = call.op._schema.arguments
    tensors = [argument.position for argument in tensor_arguments(call.op) if not argument.out]
    values = [call.arg(argument.name) for argument in schema]
    seen = [_Seen(value) if i in tensors and value is not None else value for i, value in enumerate(values)]
    rows = rows_of(*seen)
    inputs = [["_"] * len(call.arg(schema[i].name).shape) for i in tensors if call.arg(schema[i].name) is not None]
    outputs: list[dict[int, str]] = [{} for _ in call.op._schema.returns]
    reduce = ["sum"] * len(outputs)
    linear = []
    for number, (row_outputs, row_inputs) in enumerate(rows):
        given = [row_inputs[i] for i in tensors if values[i] is not None]
        name = f"f{number}"
        if any(isinstance(placement, Shard) for placement in given):
            _add_factor(name, given, row_outputs, inputs, outputs, reduce)
        elif any(isinstance(placement, Partial) for placement in given):
            linear.append("+".join(str(i) for i, placement in enumerate(given) if isinstance(placement, Partial)))
    sides = ", ".join(" ".join(dims) for dims in inputs)
    results = ", ".join(_output_text(dims) for dims in outputs)
    clauses = [f"linear {' | '.join(linear)}"] if linear else []
    return " ; ".join([f"{sides} -> {results}", *clauses, f"reduce {', '.join(reduce)}"])


def _add_factor(
    name: str,
    given: Sequence[Placement | None],
    row_outputs: Sequence[Placement | None],
    inputs: list[list[str]],
    outputs: list[dict[int, str]],
    reduce: list[str],
) -> None:
    dims = [(i, p.dim) for i, p in enumerate(given) if isinstance(p, Shard)]
    if any(inputs[i][dim] != "_" for i, dim in dims):
        return  # the dim has a factor already: the first row that names it counts
    for i, dim in dims:
        inputs[i][dim] = name
    for i, placement in enumerate(row_outputs):
        if isinstance(placement, Shard):
            outputs[i][placement.dim] = name
        elif isinstance(placement, Partial):
            reduce[i] = placement.reduce_op


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
        normal, order = normalize_placements(value._spec.view, wanted, value.dim())
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
