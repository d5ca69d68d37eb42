"""local_map: turn a function on local tensors into one on distributed tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch import pytree
from .._torch.dynamo import in_graph
from ..comm.groups import adopt
from ..errors import InputError, PlacementError, ShapeError
from ..sharding.layout import divides_evenly
from ..sharding.mesh import names_text
from ..sharding.placement import P, Placements, as_placement
from ..sharding.spec import DTensorSpec, normalize_placements
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

    Nothing is communicated to find the global shapes of the results. Their shards are taken to be even; where an input
    is sharded unevenly over the axes of a result's dim, that dim has the size of the input's. In other cases return a
    DTensor from `func`, made with `DTensor.from_local(..., shape=...)`.

    >>> scaled = local_map(lambda local, factor: local * factor, out_placements=P("dp"), in_placements=(P("dp"), None))
    >>> scaled(ones(4, device_mesh=mesh, placements=P("dp")), 3.0).tolist()
    [3.0, 3.0, 3.0, 3.0]
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

    name_of_func = getattr(func, "__name__", type(func).__name__)

    @functools.wraps(func)
    def mapped(*args: object, **kwargs: object) -> object:
        flat, tree = pytree.tree_flatten(args)
        for name, given in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if given is not None and len(given) != len(flat):
                raise InputError(
                    f"{len(given)} {name} for {len(flat)} arguments of {name_of_func}",
                    "give one for each argument, None for those that are not DTensors",
                )
        wanted, grads = in_placements or (None,) * len(flat), in_grad_placements or (None,) * len(flat)
        for i, value in enumerate(flat):
            if isinstance(value, DTensor) and in_placements is not None:
                flat[i] = _with_placements(value, i, wanted[i], redistribute_inputs, name_of_func)
        local_args = [
            value.to_local(grad_placements=grad) if isinstance(value, DTensor) else value
            for value, grad in zip(flat, grads, strict=True)
        ]
        result = func(*pytree.tree_unflatten(local_args, tree), **kwargs)
        inputs = [value for value in flat if isinstance(value, DTensor)]
        return _distributed_results(result, out_placements, device_mesh, inputs, name_of_func) if inputs else result

    return mapped


@in_graph
def _with_placements(
    value: DTensor, index: int, wanted: Placements | None, redistribute_inputs: bool, func: str
) -> DTensor:
    """Return a DTensor argument with its in_placements, redistributed if that is asked for."""
    if wanted is None:
        raise InputError(
            f"argument {index} of {func} is a DTensor, but its entry of in_placements is None",
            f"give its placements: in_placements[{index}] = {list(value.placements)}",
        )
    if value._spec.with_placements(wanted).layout is value._spec.layout:
        return value
    if not redistribute_inputs:
        named = wanted if isinstance(wanted, P) else list(wanted)
        raise PlacementError(
            f"argument {index} of {func} is {value._spec!r}, not {named}",
            "redistribute it, or pass redistribute_inputs=True",
        )
    return value.redistribute(placements=wanted)


def _distributed_results(
    result: object, out_placements: OutPlacements, mesh: DeviceMesh | None, inputs: list[DTensor], func: str
) -> object:
    """Return the results of the local function with every local tensor among them as a DTensor."""
    flat, tree = pytree.tree_flatten(result)
    wanted = _one_for_each(out_placements)
    if len(wanted) != len(flat):
        raise InputError(
            f"{len(wanted)} out_placements for {len(flat)} results of {func}",
            "give a tuple with one placement list for each result, None for those that are not tensors",
        )
    distributed = []
    for i, (value, placements) in enumerate(zip(flat, wanted, strict=True)):
        if isinstance(value, Tensor) != (placements is not None):
            kind, fix = (
                ("a tensor", "give its placements, as in out_placements=[Shard(0)]")
                if isinstance(value, Tensor)
                else ("not a tensor", "give None for it")
            )
            raise InputError(f"result {i} of {func} is {kind}, but its out_placements are {placements}", fix)
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            value = _distributed(value, mesh, placements, inputs, f"result {i} of {func}")
        distributed.append(value)
    return pytree.tree_unflatten(distributed, tree)


@in_graph
def _distributed(
    local: Tensor, device_mesh: DeviceMesh | None, placements: Placements, inputs: list[DTensor], name: str
) -> DTensor:
    """Return the DTensor of local results. Nothing is communicated.

    Shards are taken to be even, unless an input is sharded unevenly over the axes of the result's dim: then that dim is
    taken to have the input's global size. A local result that does not fit raises an error on its rank.
    """
    mesh = device_mesh if device_mesh is not None else inputs[0].device_mesh
    try:
        shape = _uneven_shape(local, mesh, placements, [value._spec for value in inputs])
        return DTensor.from_local(local, mesh, placements, shape=shape)
    except ShapeError as error:
        raise ShapeError(
            f"{name}: {error.problem}",
            "return a DTensor from the function: DTensor.from_local(local, mesh, placements, shape=...)",
        ) from None


def _uneven_shape(
    local: Tensor, mesh: DeviceMesh, placements: Placements, inputs: list[DTensorSpec]
) -> tuple[int, ...] | None:
    """Return the global shape of a local result; None where no input is sharded unevenly over the same axes."""
    mesh_info = adopt(mesh)
    uneven: dict[tuple[int, ...], set[int]] = {}
    for spec in inputs:
        for factor in (dim[0] for dim in spec.layout.dims if len(dim) == 1 and spec.mesh_info is mesh_info):
            if factor.axes and not divides_evenly(mesh_info.sizes, factor):
                uneven.setdefault(factor.axes, set()).add(factor.size)
    if not uneven:
        return None
    shape, found = list(local.shape), False
    for dim, axes in normalize_placements(mesh_info, placements, local.dim())[1]:
        sizes = uneven.get(axes, set())
        if len(sizes) > 1:
            names = names_text([mesh_info.names[axis] for axis in axes])
            raise ShapeError(
                f"dim {dim} is sharded over {names}, as are inputs of sizes {sorted(sizes)}, unevenly: "
                "its global size does not follow from a local shard"
            )
        found = found or bool(sizes)
        shape[dim] = sizes.pop() if sizes else shape[dim] * math.prod(mesh_info.sizes[axis] for axis in axes)
    return tuple(shape) if found else None


def _one_for_each(out_placements: OutPlacements) -> list[Any]:
    """Return the placements of each result. A tuple of placements is the placement list of a single result."""
    if not isinstance(out_placements, tuple):
        return [out_placements]
    single = bool(out_placements) and all(as_placement(element) for element in out_placements)
    return [out_placements] if single else list(out_placements)
