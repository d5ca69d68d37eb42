"""From local tensors to one distributed tensor: checks, and the global shape that local shapes imply.

A rank sees only its own shard. Unless the caller gives the global shape, all shards are assumed to have equal shapes,
and nothing is communicated. With `run_check=True` the ranks exchange their shapes, so that shards may be uneven.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch.fake_tensors import is_fake
from .._torch.symbols import specialized, symbolic
from ..comm.exchange import broadcast_move
from ..comm.packing import as_bytes
from ..comm.transport import check_reducible
from ..errors import InputError, ShapeError
from ..sharding.memory_order import in_memory_order
from ..sharding.mesh import MeshInfo
from ..sharding.observers import Observers
from ..sharding.placement import Partial, Placement, Placements, Replicate
from ..sharding.runtime import Runtime, WorldCache, active_runtime, on_activate
from ..sharding.spec import DTensorSpec, TensorMeta, normalize_placements
from ..world import RankTensor, replicate
from .local_shapes import LocalShapes


def check_plain_tensor(tensor: object, caller: str) -> Tensor:
    """Return the tensor; raise an error for objects that are no tensors, and for layouts other than strided."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{caller} got a {type(tensor).__name__}", "pass a torch.Tensor")
    if tensor.layout != torch.strided:
        raise InputError(f"{caller} got a tensor of layout {tensor.layout}", "make it dense first: tensor.to_dense()")
    return tensor


def check_reductions(placements: Sequence[Placement], dtype: torch.dtype) -> None:
    """Raise an error for Partial placements that have no meaning for a dtype."""
    for placement in placements:
        if isinstance(placement, Partial):
            check_reducible(dtype, placement.reduce_op)


@cache
def _device_type(device: torch.device) -> str:
    """Return the type of a device, cached: PyTorch creates a new string each time."""
    return device.type


def on_mesh(tensor: Tensor, mesh_info: MeshInfo) -> Tensor:
    """Return the tensor on the mesh's device type; in the simulated world, one copy for every rank of the mesh."""
    if _device_type(tensor.device) not in (mesh_info.device_type, "meta"):
        tensor = tensor.to(mesh_info.device_type)
    if not mesh_info.simulated:
        return tensor
    if not isinstance(tensor, RankTensor):
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _ToRanks.apply(tensor, len(mesh_info.ranks))
        tensor = replicate(tensor, len(mesh_info.ranks))
    return of_members(tensor, mesh_info)


def of_members(tensor: Tensor, mesh_info: MeshInfo) -> Tensor:
    """Return the shards of the mesh's ranks from a tensor of all simulated ranks; else the tensor itself."""
    if not (mesh_info.simulated and isinstance(tensor, RankTensor)):
        return tensor
    of_all = len(tensor.shards) == mesh_info.world_size > len(mesh_info.ranks)
    return _OfRanks.apply(tensor, mesh_info.ranks) if of_all else tensor


class _ToRanks(torch.autograd.Function):
    """A copy of a plain tensor for every rank, whose gradient is a `RankTensor`: each rank has a tensor of its own."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor, ranks: int) -> Tensor:
        return replicate(tensor, ranks)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[object, ...]:
        return grad, None


class _OfRanks(torch.autograd.Function):
    """The shards of some ranks. The gradients of the other shards are zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: RankTensor, ranks: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.zeros = ranks, [torch.zeros_like(shard) for shard in tensor.shards]
        return RankTensor([tensor.shards[rank] for rank in ranks])

    @staticmethod
    def backward(ctx: Any, grad: RankTensor) -> tuple[object, ...]:
        grads = list(ctx.zeros)
        for rank, shard in zip(ctx.ranks, grad.shards, strict=True):
            grads[rank] = shard
        return RankTensor(grads), None


def without_grad(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor without autograd history.

    Tensors of other classes that need no gradient are returned unchanged, since their `detach` may drop attributes.
    """
    return tensor.detach() if type(tensor) in _DETACHABLE or tensor.requires_grad else tensor


_DETACHABLE = frozenset((Tensor, Parameter, RankTensor))


def copy_to_replicas(local: Tensor, spec: DTensorSpec) -> Tensor:
    """Copy the first rank's data along every replicated axis."""
    mesh_info, sent = spec.mesh_info, local
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate) and mesh_info.sizes[axis] > 1:
            sent = broadcast_move(axis, 0, mesh_info, local.dtype)(sent)
    # A broadcast returns row-major data, whatever the strides of the sender.
    return local if sent is local else in_memory_order(sent, spec.memory_order)


# ---- the spec -------------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """The arguments of from_local that describe the global tensor."""

    placements: Placements | None
    shape: Sequence[int] | None
    stride: Sequence[int] | None
    source: Tensor


_SPECS: WorldCache[object, DTensorSpec] = WorldCache("specs of local tensors", 8 << 20)


class _Active:
    """The recently used specs of the active world, which `spec_of_local` looks up first.

    While local tensors are checked the table is empty, so that every tensor is. The switch is one for the process: all
    its threads run the same rank.
    """

    specs: ClassVar[dict[object, DTensorSpec] | _Observed] = {}
    checking: ClassVar[bool] = False


LOCAL_TENSORS: Observers[[DTensorSpec], None] = Observers()
"""Observers of local tensors that become distributed ones."""


class _Observed:
    """A look-up of specs that notifies the observers of local tensors."""

    def __init__(self, specs: dict[object, DTensorSpec]) -> None:
        self._specs = specs

    def get(self, key: object) -> DTensorSpec | None:
        """Return the cached spec of a local tensor, or None."""
        found = self._specs.get(key)
        if found is not None:
            LOCAL_TENSORS.notify(found)
        return found


def _use_specs_of(runtime: Runtime) -> None:
    specs = {} if _Active.checking else _SPECS.of(runtime).recent
    _Active.specs = _Observed(specs) if LOCAL_TENSORS.present else specs


on_activate(_use_specs_of)
LOCAL_TENSORS.on_change(lambda: _use_specs_of(active_runtime()))


def set_checking(enabled: bool) -> bool:
    """Turn on or off that ranks compare their local tensors in `from_local`; return the setting before."""
    before, _Active.checking = _Active.checking, enabled
    _use_specs_of(active_runtime())
    return before


def spec_of_local(
    local: Tensor,
    mesh_info: MeshInfo,
    placements: Placements | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
    source: Tensor,
) -> DTensorSpec:
    """Return the spec of the global tensor. `source` is the argument of `from_local`, which `local` was made from."""
    if type(placements) is list:
        placements = tuple(placements)
    if type(shape) is list:
        shape = tuple(shape)
    key: object = (mesh_info, placements, local.shape, local.stride(), local.dtype, shape, stride)
    try:
        found = None if run_check else _Active.specs.get(key)
    except TypeError:  # the compiler's symbols, or arguments of unexpected types, refused by name below
        key = found = None
        shape, stride = (specialized if mesh_info.simulated else symbolic)((shape, stride))
    if found is not None:
        return found
    found = _make_spec(local, mesh_info, _Given(placements, shape, stride, source), run_check)
    if key is not None and not run_check and not mesh_info.simulated:
        _SPECS.of(mesh_info.runtime)[key] = found
    LOCAL_TENSORS.notify(found)
    return found


def _make_spec(local: Tensor, mesh_info: MeshInfo, given: _Given, run_check: bool) -> DTensorSpec:
    placements, order = normalize_placements(mesh_info, given.placements, local.dim())
    check_reductions(placements, local.dtype)
    shape = _checked_shape(local, given)
    checking = _Active.checking
    if checking:
        shards = LocalShapes(local, mesh_info, True, shape, given.source.requires_grad, _fingerprint)
    else:
        shards = LocalShapes(local, mesh_info, run_check, shape, given.source.requires_grad)
    if run_check or checking:
        shards.check_alike()
    assumed = shape is None and not (run_check and shards.knows_all())
    if shape is None:
        shape = shards.even_shape(order) if assumed else shards.sum_of_shapes(placements)
    shards.check(shape, placements, order, assumed)
    if checking and not run_check:
        shards.check_replicas(placements)
    stride = tuple(given.stride) if given.stride is not None else shards.stride(shape)
    return DTensorSpec(mesh_info.mesh, placements, TensorMeta(shape, stride, local.dtype), order)


def _checked_shape(local: Tensor, given: _Given) -> torch.Size | None:
    shape, stride = given.shape, given.stride
    if shape is not None:
        if not isinstance(shape, Sequence):
            raise InputError(f"from_local got shape={shape!r}", "give one size for each dim, e.g. shape=(8, 16)")
        if len(shape) != local.dim():
            raise ShapeError(
                f"from_local got shape={list(shape)} for a local tensor of {local.dim()} dims",
                "give one size for each dim, e.g. shape=(8, 16)",
            )
    if stride is not None and shape is None:
        raise InputError("from_local got a stride without a shape", "give both, or neither")
    if stride is not None and len(stride) != local.dim():
        raise ShapeError(
            f"from_local got stride={list(stride)} for a local tensor of {local.dim()} dims",
            "give one stride for each dim, e.g. stride=(16, 1)",
        )
    return None if shape is None else torch.Size(shape)


def _fingerprint(local: Tensor) -> int:
    """Return a hash of a tensor's data."""
    if local.is_meta or is_fake(local):
        return 0
    data = as_bytes(local.detach().cpu().resolve_conj().resolve_neg())
    return int.from_bytes(hashlib.blake2b(data.numpy().tobytes(), digest_size=8).digest(), "little", signed=True)
