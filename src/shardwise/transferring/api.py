"""`transfer`: a model's state from one mesh to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt
from ..errors import InputError
from ..sharding.mesh import MeshInfo
from ..sharding.placement import P, Placements
from ..sharding.spec import DTensorSpec, contiguous_meta
from ..tensor.dtensor import DTensor
from .describing import described, specs_of
from .naming import Convert, Made, made_from, target_name
from .planning import TransferPlan, buckets_of, shipments_of
from .running import run

__all__ = ["plan_transfer", "transfer"]

PlacementsByName = Placements | Mapping[str, Placements] | Callable[[str, torch.Size], Placements]
DtypeByName = torch.dtype | Callable[[str], torch.dtype | None] | None
BUCKET_BYTES = 256 << 20


def transfer(
    state_dict: Mapping[str, object] | None,
    mesh: DeviceMesh | None = None,
    placements: PlacementsByName | None = None,
    *,
    convert: Convert | None = None,
    dtype: DtypeByName = None,
    bucket_bytes: int = BUCKET_BYTES,
    into: Mapping[str, DTensor] | None = None,
    source: DeviceMesh | None = None,
) -> dict[str, Any]:
    """Return the state dict with its tensors on another mesh.

    >>> weights = transfer(trainer.state_dict(), generator_mesh, lambda name, shape: plan[name], dtype=torch.bfloat16)

    Each rank receives exactly what it lacks. Tensors are sent in buckets, with at most `bucket_bytes` of buffers on a
    rank. All ranks of both meshes call this, with the same arguments; others need not.

    `placements` are one list for all tensors, a mapping from names, or a function of a tensor's name and shape, both
    those of the result. `convert` maps a name in the state dict to the name in the result, to None to leave the tensor
    out, or to a `Part` to concatenate several tensors: `("layers.0.qkv.weight", 0)` for q, and so on. `dtype` is the
    dtype of all floating-point tensors, or a function of the name; tensors are cast before they are sent if it is
    smaller.

    With `into`, the result is written to the tensors of that state dict, with their mesh and placements.

    Ranks outside the source mesh need not have the state dict if all ranks pass its mesh as `source`: they pass None,
    and receive names, shapes and placements. Plain tensors count as replicated over the source mesh. Other values are
    returned unchanged.
    """
    if into is not None and mesh is None:
        mesh = next((tensor.device_mesh for tensor in into.values()), None)
    specs, others = _known(state_dict, mesh, source)
    plan = _planned(specs, mesh, placements, convert, dtype, bucket_bytes, into)
    found: dict[str, object] = dict(run(plan, _tensors(state_dict), into or {}))
    for name, value in others.items():
        target = name if convert is None else convert(name)
        if target is not None:
            found[target_name(target)] = value
    return found


def plan_transfer(
    state_dict: Mapping[str, object],
    mesh: DeviceMesh | None = None,
    placements: PlacementsByName | None = None,
    *,
    convert: Convert | None = None,
    dtype: DtypeByName = None,
    bucket_bytes: int = BUCKET_BYTES,
    into: Mapping[str, DTensor] | None = None,
) -> TransferPlan:
    """Return the plan of `transfer` with these arguments. The values of the state dict may be specs.

    >>> weights = {"w": zeros(8, 4, device_mesh=mesh["dp"], placements=[Shard(0)])}
    >>> plan_transfer(weights, mesh, lambda name, shape: P("tp")).targets
    {'w': f32[8@tp, 4]}
    """
    return _planned(specs_of(state_dict, None), mesh, placements, convert, dtype, bucket_bytes, into)


def _known(
    state_dict: Mapping[str, object] | None, mesh: DeviceMesh | None, source: DeviceMesh | None
) -> tuple[dict[str, DTensorSpec], dict[str, object]]:
    """Return the specs of the tensors in the source's state dict, and the values that are not tensors."""
    if source is not None and mesh is not None:
        return described(state_dict, adopt(source), adopt(mesh))
    if state_dict is None:
        raise InputError("transfer got no state dict", "pass source=, the mesh of the ranks that have it, on all ranks")
    others = {name: value for name, value in state_dict.items() if not isinstance(value, Tensor)}
    return specs_of(state_dict, None), others


def _planned(
    sources: dict[str, DTensorSpec],
    mesh: DeviceMesh | None,
    placements: PlacementsByName | None,
    convert: Convert | None,
    dtype: DtypeByName,
    bucket_bytes: int,
    into: Mapping[str, DTensor] | None,
) -> TransferPlan:
    for spec in sources.values():
        adopt(spec.mesh)
    made = made_from({name: (spec.shape, spec.dtype) for name, spec in sources.items()}, convert)
    if into is not None:
        targets = {name: _existing(name, each, into) for name, each in made.items()}
    elif mesh is None or placements is None:
        raise InputError("transfer got no mesh or no placements", "pass both, or `into`: tensors to write to")
    else:
        mesh_info = adopt(mesh)
        targets = {name: _target(name, each, mesh_info, placements, dtype) for name, each in made.items()}
    shipments = tuple(shipments_of(sources, targets, made))
    # Two collectives are in flight at a time.
    return TransferPlan(sources, targets, shipments, tuple(buckets_of(shipments, bucket_bytes // 2)), bucket_bytes)


def _target(
    name: str, made: Made, mesh_info: MeshInfo, placements: PlacementsByName, dtype: DtypeByName
) -> DTensorSpec:
    given: Any = placements
    if callable(placements):
        given = placements(name, made.shape)
    elif isinstance(placements, Mapping) and not isinstance(placements, P):
        given = placements.get(name)
        if given is None:
            raise InputError(
                f"transfer got no placements for {name!r}",
                f"add it to placements, which has {len(placements)} names such as {next(iter(placements), None)!r}, "
                "or let convert= return None for it",
            )
    wanted = dtype(name) if callable(dtype) else dtype if made.dtype.is_floating_point else None
    return DTensorSpec(mesh_info.mesh, given, contiguous_meta(made.shape, wanted or made.dtype))


def _existing(name: str, made: Made, into: Mapping[str, DTensor]) -> DTensorSpec:
    found = into.get(name)
    if not isinstance(found, DTensor) or found.shape != made.shape:
        what = "is not in `into`" if found is None else f"is {type(found).__name__} {list(found.shape)} in `into`"
        raise InputError(
            f"transfer cannot write {name!r} of shape {list(made.shape)}, which {what}",
            "give a DTensor of that shape for each tensor, or let convert= return None for it",
        )
    return found._spec


def _tensors(state_dict: Mapping[str, object] | None) -> dict[str, Tensor]:
    return {name: value for name, value in (state_dict or {}).items() if isinstance(value, Tensor)}
