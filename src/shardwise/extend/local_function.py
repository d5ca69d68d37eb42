"""local_map: a function on distributed tensors from one on local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch import pytree
from ..errors import InputError, PlacementError
from ..sharding.placement import Placement, Placements
from ..sharding.spec import normalize_placements
from ..tensor.dtensor import DTensor

InPlacements = tuple[Placements | None, ...] | None
OutPlacements = Placements | tuple[Placements | None, ...] | None


def local_map(
    func: Callable[..., object] | None = None,
    out_placements: OutPlacements = None,
    in_placements: InPlacements = None,
    in_grad_placements: InPlacements = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function on distributed tensors that calls `func` on their local tensors. It is differentiable.

    `func` gets the local tensor of every DTensor argument, and its results become DTensors with `out_placements` (one
    placement list, or a tuple of them for several results; None for results that are not tensors). Arguments must have
    `in_placements`, where given, or are redistributed to them with `redistribute_inputs=True`. `in_grad_placements` are
    the placements of the gradients of the local arguments, where they differ from those of the arguments.
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
    def mapped(*args: object, **kwargs: object) -> object:
        flat, tree = pytree.tree_flatten(args)
        mesh = device_mesh or next((value.device_mesh for value in flat if isinstance(value, DTensor)), None)
        for name, given in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if given is not None and len(given) != len(flat):
                raise InputError(f"{len(given)} {name} for {len(flat)} arguments of {func.__name__}", "give one each")
        local_args = [
            _local_argument(value, i, in_placements, in_grad_placements, redistribute_inputs, func)
            for i, value in enumerate(flat)
        ]
        result = func(*pytree.tree_unflatten(local_args, tree), **kwargs)
        if not any(isinstance(value, DTensor) for value in flat):
            return result
        assert mesh is not None, "some argument is a DTensor, so there is a mesh"
        return _distributed_results(result, out_placements, mesh, func)

    return mapped


def _local_argument(
    value: object,
    index: int,
    in_placements: InPlacements,
    in_grad_placements: InPlacements,
    redistribute_inputs: bool,
    func: Callable[..., object],
) -> object:
    """Return the local tensor of a DTensor argument, redistributed if that is asked for; other values unchanged."""
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


def _distributed_results(
    result: object, out_placements: OutPlacements, mesh: DeviceMesh, func: Callable[..., object]
) -> object:
    """Return the results of the local function with every local tensor among them as a DTensor."""
    flat, tree = pytree.tree_flatten(result)
    wanted = _one_for_each(out_placements)
    if len(wanted) != len(flat):
        raise InputError(
            f"{len(wanted)} out_placements for {len(flat)} results of {func.__name__}",
            "give a tuple with one placement list for each result, None for those that are not tensors",
        )
    distributed = []
    for i, (value, placements) in enumerate(zip(flat, wanted, strict=True)):
        if isinstance(value, Tensor) != (placements is not None):
            kind = "a tensor" if isinstance(value, Tensor) else "not a tensor"
            raise InputError(
                f"result {i} of {func.__name__} is {kind}, its out_placements are {placements}", "change them"
            )
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            value = DTensor.from_local(value, mesh, placements)
        distributed.append(value)
    return pytree.tree_unflatten(distributed, tree)


def _one_for_each(out_placements: OutPlacements) -> list[Any]:
    """Return the placements of each result. A tuple of placements is the placement list of a single result."""
    if not isinstance(out_placements, tuple):
        return [out_placements]
    single = bool(out_placements) and all(isinstance(element, Placement) for element in out_placements)
    return [out_placements] if single else list(out_placements)
