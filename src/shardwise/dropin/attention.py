"""Context parallel by the names of `torch.distributed.tensor.experimental._attention`.

Inside `context_parallel`, the buffers hold this rank's shard of the sequence, and `F.scaled_dot_product_attention` of
plain tensors is that of the global sequence: its arguments are taken as sharded over the mesh in the sequence dim.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ..errors import InputError, ShapeError
from ..sharding.placement import Shard
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor
from ..world import RankTensor

_SEQUENCE_DIM = 2
"""The sequence dim of queries, keys and values."""


class _RotateMethod(enum.Enum):
    """How keys and values travel between ranks."""

    ALL_TO_ALL = 1
    ALL_GATHER = 2


@dataclass
class _Options:
    convert_to_f32: bool = True
    enable_load_balance: bool = False
    rotate_method: _RotateMethod = _RotateMethod.ALL_GATHER


_cp_options = _Options()


def set_rotate_method(rotate_method: str) -> None:
    """Choose how keys and values travel: "allgather" or "alltoall". The values computed are the same."""
    names = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}
    if rotate_method not in names:
        raise InputError(f"set_rotate_method({rotate_method!r})", f"use one of {', '.join(names)}")
    _cp_options.rotate_method = names[rotate_method]


class _Attention(TorchFunctionMode):
    """Attention of plain tensors that hold this rank's shard of the sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.placements = [Shard(_SEQUENCE_DIM)] * mesh.ndim

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or any(isinstance(value, DTensor) for value in args):
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value"), args, strict=False)) | {
            name: kwargs.pop(name) for name in ("query", "key", "value") if name in kwargs
        }
        whole = [self._sharded(named[name]) for name in ("query", "key", "value")]
        result: DTensor = func(*whole, *args[3:], **kwargs)
        return result.redistribute(placements=self.placements).to_local()

    def _sharded(self, tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, self.mesh, self.placements)


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Inside, the buffers are shards of a sequence, and attention of plain tensors is that of the global sequence.

    Each buffer is sharded over `mesh` in its dim of `buffer_seq_dims`, in place, and restored at the end unless it is
    in `no_restore_buffers`.

    >>> with context_parallel(mesh["cp"], buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
    ...     loss(model(tokens), labels).backward()
    """
    buffers, dims = buffers or [], buffer_seq_dims or []
    if len(buffers) != len(dims):
        raise InputError(f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims", "give one dim for each buffer")
    kept = no_restore_buffers or set()
    saved = [None if buffer in kept else buffer.detach().clone() for buffer in buffers]
    for buffer, shard in zip(buffers, _context_parallel_shard(mesh, buffers, dims), strict=True):
        _replace_data(buffer, shard)
    try:
        with _Attention(mesh):
            yield
    finally:
        for buffer, original in zip(buffers, saved, strict=True):
            if original is not None:
                _replace_data(buffer, original)


def _context_parallel_shard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: object = None
) -> list[Tensor]:
    """This rank's shard of each buffer."""
    if load_balancer is not None:
        raise InputError("context parallel with a load balancer", "leave it out: the values are the same")
    return [_shard(mesh, buffer, dim) for buffer, dim in zip(buffers, seq_dims, strict=True)]


def _shard(mesh: DeviceMesh, buffer: Tensor, dim: int) -> Tensor:
    if buffer.shape[dim] % mesh.size():
        raise ShapeError(
            f"a sequence of {buffer.shape[dim]} over {mesh.size()} ranks", "pad it to a multiple of the mesh's size"
        )
    shard = distribute_tensor(buffer.detach(), mesh, [Shard(dim)] * mesh.ndim, src_data_rank=None).to_local()
    if isinstance(shard, RankTensor) and not isinstance(buffer, RankTensor):
        raise InputError(
            "context_parallel with plain buffers in a simulated world: one plain tensor cannot become a shard per rank",
            "distribute them before, and pass no buffers: distribute_tensor(x, mesh, [Shard(dim)]).to_local()",
        )
    return shard


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: object = None
) -> list[Tensor]:
    """The global sequence of each local shard."""
    return [
        DTensor.from_local(buffer, mesh, [Shard(dim)] * mesh.ndim).full_tensor()
        for buffer, dim in zip(buffers, seq_dims, strict=True)
    ]


def _replace_data(buffer: Tensor, data: Tensor) -> None:
    with torch.no_grad():
        buffer.resize_(data.shape).copy_(data)


class _LoadBalancer:
    """Base class of load balancers, which reorder a sequence before it is sharded. None is supported."""


class _HeadTailLoadBalancer(_LoadBalancer):
    """Gives each rank one shard of the head and one of the tail of the sequence."""
