"""shard_parameters: shard every parameter of a module, by one placement for all or by a function of names.

>>> shard_parameters(model, mesh, P(("dp", "tp")))                                      # ZeRO-3
>>> shard_parameters(model, mesh, lambda name, p: P(None, "tp") if "down" in name else P("tp"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt
from ..errors import PlacementError, ShardwiseError
from ..sharding.mesh import MeshInfo, current_mesh
from ..sharding.placement import Placements
from ..sharding.spec import normalize_placements
from ..tensor.dtensor import DTensor
from .parameters import Owner, distribute_parameter, keep_ties, replicate_rest

PlacementFn = Callable[[str, Tensor], Placements | None]


def shard_parameters(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | PlacementFn | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Shard all parameters of a module over a mesh, and replicate its buffers.

    `placements` are those of every parameter, as in `distribute_tensor`, or a function `(name, parameter) ->
    placements` that may return None to replicate. Parameters without dims are replicated; those that are distributed
    already stay unchanged.

    Parameters that modules share stay shared. The function is called with each of their names: None then leaves
    the choice to other names, and different placements are an error.

    >>> shard_parameters(model, mesh, P(("dp", "tp")))[0].weight.spec
    f32[8@(dp, tp), 4]
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    with keep_ties(module) as ties:
        for _, parameter in list(module.named_parameters()):
            if isinstance(parameter, DTensor) or not parameter.dim():
                continue
            owners = ties.owners(parameter)
            placements_of = placements if callable(placements) else lambda name, parameter: placements
            chosen = _choose(owners, parameter, placements_of, adopt(mesh))
            if chosen is not None:
                distribute_parameter(owners[0].module, owners[0].name, mesh, chosen, src_data_rank)
        for submodule in module.modules():
            replicate_rest(submodule, mesh, src_data_rank)
    return module


def _choose(
    owners: Sequence[Owner], parameter: Tensor, placements_of: PlacementFn, mesh_info: MeshInfo
) -> Placements | None:
    """Return the placements that the function returns for the names of a parameter; None if it does for no name."""
    first: tuple[str, Placements, object] | None = None
    for owner in owners:
        found = placements_of(owner.path, parameter)
        if found is None:
            continue
        try:
            normal = normalize_placements(mesh_info, found, parameter.dim())
        except ShardwiseError as error:
            problem = f"parameter {owner.path!r} of shape {list(parameter.shape)}: {error.problem}"
            raise type(error)(problem, error.fix) from error
        if first is None:
            first = owner.path, found, normal
        elif normal != first[2]:
            raise PlacementError(
                f"{first[0]!r} and {owner.path!r} are one tied parameter, and were given the placements "
                f"{_text(first[1])} and {_text(found)}",
                "return the same placements for both, or None for one of them",
            )
    return None if first is None else first[1]


def _text(placements: Placements) -> str:
    return str(list(placements)) if isinstance(placements, Sequence) else str(placements)
