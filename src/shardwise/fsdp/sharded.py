"""Replace a parameter by a sharded one: its spec, its data, and its registration in the modules that own it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..errors import InputError
from ..nn.replaced import copy_attributes, record_replacement
from ..tensor.dtensor import DTensor
from .axes import DataAxes
from .memory import Piece
from .parameter import Owner, ShardedParameter, shard_of
from .ranks import on_each_rank
from .specs import spec_of_distributed, spec_of_plain


def shard_parameter(
    name: str, parameter: nn.Parameter, owners: list[Owner], axes: DataAxes, dim: int
) -> tuple[ShardedParameter, Tensor]:
    """Return the `ShardedParameter` for a plain or distributed one, and the local tensor with all rows of its data.

    Nothing is sharded yet: the group copies this rank's rows into a flat buffer.
    """
    distributed = parameter if isinstance(parameter, DTensor) else None
    dim = _checked_dim(name, parameter, dim)
    if distributed is None:
        spec, other, local = spec_of_plain(parameter, axes, dim), None, parameter.detach()
    else:
        spec, other = spec_of_distributed(name, distributed._spec, axes, dim)
        local = distributed._local_shard.detach()
    return ShardedParameter(name, owners, axes, dim, spec, other, parameter), local


def replace_by(parameter: ShardedParameter, local: Tensor) -> None:
    """Set the distributed tensor with this local shard as the parameter of all owners."""
    old = parameter.sharded
    new = nn.Parameter(DTensor.wrap(local, parameter.spec), old.requires_grad)
    if isinstance(old, DTensor):
        new.__dict__.update({key: value for key, value in old.__dict__.items() if key != "_leaf_gradient"})
    else:
        copy_attributes(old, new)  # type: ignore[arg-type]
        record_replacement(old, new)  # type: ignore[arg-type]
    parameter.sharded = new
    parameter.local = shard_of(new)
    parameter.put(new)


def _checked_dim(name: str, parameter: Tensor, dim: int) -> int:
    if not parameter.dim():
        raise InputError(
            f"fully_shard got the parameter {name!r}, which has no dims to shard",
            f"give it the shape [1], or pass ignored_params={{module.{name}}}",
        )
    if not -parameter.dim() <= dim < parameter.dim():
        raise InputError(
            f"shard_placement_fn returned Shard({dim}) for the parameter {name!r} of shape {list(parameter.shape)}",
            f"return one of its dims, Shard(0) to Shard({parameter.dim() - 1})",
        )
    return dim % parameter.dim()


def shard_data(
    parameter: ShardedParameter, piece_at: Callable[[int | None], Piece], local: Tensor, flat: Tensor
) -> None:
    """Copy this rank's rows of a parameter into the flat buffer. `local` has all rows."""

    def copy(rank: int | None, flat: Tensor, local: Tensor) -> None:
        piece = piece_at(rank)
        first = parameter.index_at(rank) * piece.rows
        rows = local.movedim(parameter.dim, 0)[first : first + piece.rows]
        flat.as_strided(*parameter.shard_view(piece, rank)).copy_(rows.movedim(0, parameter.dim))

    on_each_rank(copy, flat, local)
