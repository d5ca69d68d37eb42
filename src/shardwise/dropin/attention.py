"""Context parallel by the names of `torch.distributed.tensor.experimental._attention`.

Inside `context_parallel`, the buffers hold this rank's shard of the sequence, and `F.scaled_dot_product_attention` of
plain tensors is that of the global sequence: its arguments are taken as sharded over the mesh in the sequence dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ..comm.groups import adopt
from ..dispatch.arguments import Args, Kwargs
from ..dispatch.modes import implicit_replication
from ..errors import InputError, ShapeError
from ..ops.sequence_options import ContextOptions, RotateMethod, attention_over_sequence, options
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Shard
from ..sharding.runtime import WorldState
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor
from ..world import RankTensor
from .load_balancers import _HeadTailLoadBalancer, _LoadBalancer

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_SEQUENCE_DIM = 2
"""The sequence dim of queries, keys and values."""


_RotateMethod = RotateMethod
_Options = ContextOptions
_cp_options = options


def set_rotate_method(rotate_method: str) -> None:
    """Choose how keys and values are sent in this process: "allgather", or "alltoall" for a ring.

    Results do not depend on it. Without this call, the cost model chooses between a ring and an all-to-all by heads.

    >>> set_rotate_method("alltoall")
    """
    names = {"allgather": RotateMethod.ALL_GATHER, "alltoall": RotateMethod.ALL_TO_ALL}
    if rotate_method not in names:
        raise InputError(f"set_rotate_method({rotate_method!r})", f"use one of {', '.join(names)}")
    _cp_options.rotate_method = names[rotate_method]


_ARRANGED: WorldState[dict[MeshInfo, _LoadBalancer | None]] = WorldState(dict)
"""For each mesh, the load balancer of the buffers that were sharded over it last."""


class _Attention(TorchFunctionMode):
    """Attention of plain tensors that hold this rank's shard of the sequence."""

    def __init__(self, mesh: DeviceMesh, dim: int = _SEQUENCE_DIM) -> None:
        super().__init__()
        self.mesh, self.dim = mesh, dim
        self.placements = [Shard(dim)] * mesh.ndim

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or any(isinstance(value, DTensor) for value in args):
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value"), args, strict=False)) | {
            name: kwargs.pop(name) for name in ("query", "key", "value") if name in kwargs
        }
        mesh_info = adopt(self.mesh)
        balancer = _ARRANGED.of(mesh_info.runtime).get(mesh_info)
        shards = [DTensor.from_local(named[name], self.mesh, self.placements) for name in ("query", "key", "value")]
        result: DTensor
        if self._follows_positions(balancer, shards, len(args) > 3 or "attn_mask" in kwargs):
            with attention_over_sequence(zigzag=True):
                result = func(*shards, *args[3:], **kwargs)
        else:
            ordered = [_rearranged(shard, self.dim, balancer, restore=True) for shard in shards]
            result = _rearranged(func(*ordered, *args[3:], **kwargs), self.dim, balancer)
        return result.redistribute(placements=self.placements).to_local()

    def _follows_positions(self, balancer: _LoadBalancer | None, shards: Sequence[DTensor], masked: bool) -> bool:
        """Return whether a ring handles the order of the load balancer, so that the sequence need not be restored."""
        if type(balancer) is not _HeadTailLoadBalancer or masked or self.dim != _SEQUENCE_DIM:
            return False
        fits = balancer.world_size == self.mesh.size() and all(shard.dim() == 4 for shard in shards)
        return fits and all(shard.shape[self.dim] == balancer.seq_length for shard in shards)


def _enable_context_parallel_dispatcher() -> None:
    """Do nothing: attention of distributed tensors is always that of the global sequence."""


_disable_context_parallel_dispatcher = _enable_context_parallel_dispatcher


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Shard buffers by position inside the block, and compute attention of plain tensors over the global sequence.

    Each buffer is sharded over `mesh` in its dim of `buffer_seq_dims`, in place, and restored at the end unless it is
    in `no_restore_buffers`.

    >>> with context_parallel(mesh["cp"], buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
    ...     loss(model(tokens), labels).backward()
    """
    buffers, dims = buffers or [], buffer_seq_dims or []
    if len(buffers) != len(dims):
        raise InputError(
            f"context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims",
            "give one dim for each buffer",
        )
    kept = no_restore_buffers or set()
    saved = [None if buffer in kept else buffer.detach().clone() for buffer in buffers]
    balancer = _default_balancer(mesh, buffers[0].shape[dims[0]], buffers[0].device) if buffers else None
    mesh_info = adopt(mesh)
    arranged = _ARRANGED.of(mesh_info.runtime)
    before = arranged.get(mesh_info)
    for buffer, shard in zip(buffers, _context_parallel_shard(mesh, buffers, dims, balancer), strict=True):
        _replace_data(buffer, shard)
    try:
        with _Attention(mesh):
            yield
    finally:
        for buffer, original in zip(buffers, saved, strict=True):
            if original is not None:
                _replace_data(buffer, original)
        if not kept:  # buffers that stay sharded stay in the order of this block
            arranged[mesh_info] = before


def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor | BlockMask] | Mapping[str, Tensor | BlockMask],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: _LoadBalancer | None = None,
) -> list[Any]:
    """Return this rank's shard of each buffer, in the order of the load balancer; of a BlockMask, this rank's rows.

    Attention over this mesh assumes that its arguments have the order of the last call.
    """
    if isinstance(buffers, Mapping):
        assert isinstance(seq_dims, Mapping)
        seq_dims = [seq_dims[name] for name in buffers]
        buffers = list(buffers.values())
    assert not isinstance(seq_dims, Mapping)
    if buffers:
        mesh_info = adopt(mesh)
        _ARRANGED.of(mesh_info.runtime)[mesh_info] = load_balancer
    pairs = zip(buffers, seq_dims, strict=True)
    return [
        _rank_block_mask(buffer, mesh, load_balancer)
        if not isinstance(buffer, Tensor)
        else _shard(mesh, _rearranged(buffer.detach(), dim, load_balancer), dim)
        for buffer, dim in pairs
    ]


def _rank_block_mask(mask: BlockMask, mesh: DeviceMesh, balancer: _LoadBalancer | None) -> BlockMask:
    from .block_masks import rank_block_mask  # imports PyTorch's flex_attention, which is slow

    return rank_block_mask(mask, mesh, balancer)


T = TypeVar("T", bound=Tensor)


def _rearranged(tensor: T, dim: int, balancer: _LoadBalancer | None, restore: bool = False) -> T:
    """Return a tensor with its sequence in the order of a load balancer, or restored from it."""
    indices = None if balancer is None else balancer._generate_indices(restore)
    if indices is None:
        return tensor
    if indices.shape[-1] != tensor.shape[dim]:
        raise ShapeError(
            f"dim {dim} of a tensor of shape {list(tensor.shape)} is the sequence, but the load balancer is for length "
            f"{indices.shape[-1]}",
            "shard the buffers of this step with a load balancer for its length, or with none",
        )
    with implicit_replication():  # the indices are the same on all ranks
        if len(indices) == 1:
            return cast(T, tensor.index_select(dim, indices[0].long().to(tensor.device)))
        shape = [1] * tensor.dim()
        shape[0], shape[dim] = len(indices), indices.shape[-1]
        index = indices.long().to(tensor.device).view(shape).expand(tensor.shape)
        return cast(T, tensor.gather(dim, index))


def _default_balancer(mesh: DeviceMesh, length: int, device: torch.device) -> _LoadBalancer | None:
    return _HeadTailLoadBalancer(length, mesh.size(), device) if _cp_options.enable_load_balance else None


def _shard(mesh: DeviceMesh, buffer: Tensor, dim: int) -> Tensor:
    if buffer.shape[dim] % mesh.size():
        raise ShapeError(
            f"a sequence of {buffer.shape[dim]} tokens cannot be sharded evenly over {mesh.size()} ranks",
            f"pad it to a multiple of {mesh.size()}",
        )
    shard = distribute_tensor(buffer, mesh, [Shard(dim)] * mesh.ndim, src_data_rank=None).to_local()
    if isinstance(shard, RankTensor) and not isinstance(buffer, RankTensor):
        raise InputError(
            "context_parallel got plain buffers in a simulated world: one plain tensor cannot become a shard per rank",
            "shard them yourself, and pass no buffers: distribute_tensor(x, mesh, [Shard(dim)]).to_local()",
        )
    return shard


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: _LoadBalancer | None = None
) -> list[Tensor]:
    """Gather the global sequence of each local shard, in the order before the load balancer."""
    found = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        gathered = DTensor.from_local(buffer, mesh, [Shard(dim)] * mesh.ndim).full_tensor()
        balancer = load_balancer or _default_balancer(mesh, gathered.shape[dim], gathered.device)
        found.append(_rearranged(gathered, dim, balancer, restore=True))
    return found


def _replace_data(buffer: Tensor, data: Tensor) -> None:
    with torch.no_grad():
        buffer.resize_(data.shape).copy_(data)
