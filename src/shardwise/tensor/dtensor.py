"""DTensor: one tensor whose data is cut over a mesh of devices.

>>> with shardwise.simulate(4):
...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
...     x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
...     x.shards[3]
tensor([6., 7.])
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import _foreach_supported_types as _optimized_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipped_types

from .._torch.bindings import QuickFunction
from ..comm.groups import adopt, before_first_use, first_use
from ..comm.plan import SpecPlan
from ..comm.redistribute import plan as plan_between
from ..comm.redistribute import redistribute_local, start_redistribute
from ..dispatch.dispatcher import OpDispatcher, Replay
from ..dispatch.gather_cache import mark_exposed
from ..dispatch.hot_path import hot_path
from ..errors import InputError, MeshError
from ..overrides.install import install_overrides
from ..sharding.base import DTensorBase
from ..sharding.mesh import current_mesh, mesh_info_of
from ..sharding.placement import (
    InterleavedShard,
    P,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    ShardOrder,
    ShardOrderEntry,
)
from ..sharding.spec import (
    DTensorSpec,
    TensorMeta,
    contiguous_meta,
    in_memory_order,
    memory_order,
    normalize_placements,
    rebuild_spec,
)
from ..world import RankTensor
from .from_local import check_plain_tensor, copy_to_replicas, on_mesh, spec_of_local
from .leaf_gradient import Home

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["DTensor"]

_make_wrapper = torch.Tensor._make_wrapper_subclass
_strided = torch.strided
_data: Any = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad


class DTensor(DTensorBase):
    """A tensor cut over a mesh: it looks like the whole, and each rank holds its part, `_local_tensor`, by `_spec`."""

    __slots__ = ("_home", "_pending")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _pending: Any
    _home: Home  # of a leaf: where its gradient is brought, shared with the hook that brings it
    _op_dispatcher: OpDispatcher

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
        """The tensor that has this spec and, on this rank, this local part. Nothing is checked or copied."""
        if local_tensor.requires_grad and not requires_grad:
            raise InputError(
                "the DTensor constructor got a local tensor that requires grad",
                "use DTensor.from_local, which is differentiable, or detach it",
            )
        first_use()
        tensor = _wrap(local_tensor, spec)
        return tensor.requires_grad_() if requires_grad else tensor

    @classmethod
    def wrap(cls, local: Tensor, spec: DTensorSpec) -> DTensor:
        """The distributed tensor with this local shard and this spec. Nothing is checked or copied."""
        return _wrap(local, spec)

    # ---- to and from local tensors ------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
    ) -> DTensor:
        """The distributed tensor of which `local_tensor` is this rank's part. Differentiable.

        Without `shape`, and with a dim cut, the ranks tell each other their local shapes, so that uneven parts are
        put together right. `run_check=True` also compares dtypes and copies the first rank's data along replicated
        axes. `grad_placements` are those of the gradient that goes back to `local_tensor`.
        """
        local = check_plain_tensor(local_tensor, "from_local")
        if isinstance(local, DTensor):
            raise InputError("from_local got a DTensor", "pass its local part, x.to_local(), or use x.redistribute")
        mesh_info = adopt(device_mesh if device_mesh is not None else current_mesh())
        data = on_mesh(local.detach(), mesh_info)
        spec = spec_of_local(data, mesh_info, placements, shape, stride, run_check)
        if run_check:
            data = copy_to_replicas(data, mesh_info, spec.placements)
        if torch.is_grad_enabled() and local.requires_grad:
            return _FromLocal.apply(local, data, spec, _grad_spec_of_local(spec, grad_placements))
        return _wrap(data, spec)

    def to_local(self, *, grad_placements: Placements | None = None) -> Tensor:
        """This rank's part, as an ordinary tensor. Differentiable.

        `grad_placements` say how the gradient of the local tensor is to be understood; by default it is cut as
        this tensor, and replicated where this tensor is Partial.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            spec = self._spec
            grad_spec = _spec_like(spec, grad_placements) if grad_placements is not None else spec.cotangent()
            return _ToLocal.apply(self, grad_spec)
        mark_exposed(self)
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Placements | None = None) -> Tensor:
        """The whole value, as an ordinary tensor on every rank. Differentiable."""
        replicated = [Replicate()] * len(self._spec.mesh_info.sizes)
        return self.redistribute(placements=replicated).to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor with other placements on its mesh. Differentiable, twice.

        With `async_op=True` the last collective is still under way on return, and is waited for on first use.
        `forward_dtype` is the dtype of the communication and of the result, `backward_dtype` that of the communication
        of the gradient, which then takes this tensor's dtype.
        """
        spec = self._spec
        if device_mesh is not None and device_mesh is not spec.mesh and mesh_info_of(device_mesh) is not spec.mesh_info:
            raise MeshError(
                f"redistribute of {spec!r} on {spec.mesh_info!r} to {mesh_info_of(device_mesh)!r}: "
                "a tensor stays on its mesh",
                "give placements only, or full_tensor() and distribute_tensor on the other mesh",
            )
        if placements is None:
            raise InputError("redistribute got no placements", "give one placement for each mesh axis, or P(...)")
        target = _spec_like(spec, placements)
        return self._to_spec(target, async_op, forward_dtype, backward_dtype)

    def _to_spec(
        self,
        target: DTensorSpec,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        if torch.is_grad_enabled() and self.requires_grad:
            return _Redistribute.apply(self, target, async_op, forward_dtype, backward_dtype)
        return _moved(self._local_tensor, self._spec, target, async_op, forward_dtype)

    # ---- what it is -----------------------------------------------------------------------------------------

    @property
    def spec(self) -> DTensorSpec:
        """Mesh, placements, order of the cuts, shape, stride and dtype, in one value that prints in one line."""
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor is cut over."""
        return self._spec.mesh_info.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return self._spec.placements

    @property
    def shard_order(self) -> ShardOrder:
        """For each cut dim the axes that cut it, major to minor."""
        return self._spec.shard_order

    @property
    def shards(self) -> dict[int, Tensor]:
        """The local tensors that this process holds, by rank: all of them when simulated, else its own."""
        local = self._local_tensor
        mark_exposed(self)
        if isinstance(local, RankTensor):
            return dict(enumerate(local.shards))
        return {dist.get_rank(): local}

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        grad = grad or (", requires_grad=True" if self.requires_grad else "")
        return f"DTensor({self._spec!r} on {self._spec.mesh_info!r}{grad}, local={self._local_tensor!r})"

    # ---- wrapper and shard stay together ----------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """The same data, detached."""
        # A view that is made again counts the writes to its root, which data with a count of its own would not see.
        return self.detach() if type(self) is _ReplayedDTensor else _data.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, DTensor):
            raise InputError("the data of a DTensor was set to a plain tensor", "distribute it first")
        local = other._local_tensor
        _data.__set__(self, other)
        if type(self) is not DTensor:
            object.__setattr__(self, "__class__", DTensor)  # no longer a view of what it was
        self._local_tensor, self._spec = local, other._spec
        if hasattr(self, "_home"):
            self._home.spec = other._spec

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to this tensor."""
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """As for any tensor. A leaf's gradient takes the leaf's own placements."""
        changes = requires_grad and not self.requires_grad
        super().requires_grad_(requires_grad)
        if changes and self.is_leaf:
            _reduce_gradient_of(self)
        return self

    def tolist(self) -> Any:
        """The whole value as nested lists."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole value as a numpy array."""
        return self.full_tensor().numpy(force=force)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else repr(self)

    def _has_no_memory(self, *args: object, **kwargs: object) -> Any:
        raise InputError("a DTensor has no memory of its own to share or visit", "use x.to_local() or x.full_tensor()")

    share_memory_ = apply_ = map_ = __dlpack__ = _has_no_memory

    # ---- copies and files -----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise InputError("deepcopy of a DTensor that is not a leaf", "detach it, or copy what it was made from")
        copied = _rebuild(copy.deepcopy(self._local_tensor, memo), self._spec, self.requires_grad, _is_param(self))
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _rebuild, (self._local_tensor, self._spec, self.requires_grad, _is_param(self))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """For the compiler: the inner tensor, and what else it takes to build this one (sizes come separately)."""
        spec = self._spec
        return ["_local_tensor"], (spec.mesh, spec.placements, spec.shard_order, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        """For the compiler: back from `__tensor_flatten__`."""
        local = inner_tensors["_local_tensor"]
        mesh, placements, order, requires_grad = context
        meta = TensorMeta(torch.Size(outer_size), tuple(outer_stride), local.dtype)
        tensor = _wrap(local, DTensorSpec(mesh, placements, meta, order))
        return tensor.requires_grad_() if requires_grad else tensor

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """For torch.distributed.checkpoint: what this process writes."""
        from .checkpoint import write_items

        return write_items(fqn, self._local_tensor, self._spec)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """For torch.distributed.checkpoint: what this process reads."""
        from .checkpoint import chunk_list

        return chunk_list(self._local_tensor, self._spec)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """For torch.distributed.checkpoint: the part that an index names."""
        from .checkpoint import shard_at

        return shard_at(index, self._local_tensor, self._spec)


# ---- making them ---------------------------------------------------------------------------------------------------


def _wrap(local: Tensor, spec: DTensorSpec) -> DTensor:
    shape, stride, dtype = spec.tensor_meta
    tensor = _make_wrapper(DTensor, shape, stride, None, None, dtype, _strided, local.device)
    tensor._local_tensor = local
    tensor._spec = spec
    return tensor


class _ReplayedDTensor(DTensor):
    """A view of a distributed tensor that is no view of local memory, such as a slice of a cut dim.

    Reading it after its root has changed makes it again from the root; writing it writes the root (`_write_back`).
    """

    __slots__ = ()

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        replay, seen = self._pending
        if seen is None or seen != self._version:
            fresh = replay.of(replay.root)
            # Just made, so it is not looked up again: an inference tensor would be made anew for ever.
            _slot.__set__(self, redistribute_local(_slot.__get__(fresh), fresh._spec, self._spec))
            self._pending = replay, _version(self)
        return _slot.__get__(self)


_slot: Any = DTensor._local_tensor


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written; inference tensors do not count, so None: assume it was."""
    return None if tensor.is_inference() else tensor._version


def _wrap_view(local: Tensor, spec: DTensorSpec, base: DTensor, replay: Replay | None) -> DTensor:
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch._C._InferenceMode(False):  # a view of a normal tensor is one, too
            return _wrap_view(local, spec, base, replay)
    if replay is None:
        return _wrap(local, spec)
    shape, stride, dtype = spec.tensor_meta
    tensor = _make_wrapper(_ReplayedDTensor, shape, stride, dtype=dtype, device=local.device)
    _slot.__set__(tensor, local)
    tensor._spec = spec
    tensor._pending = replay, _version(base)
    return tensor


def _write_back(tensor: DTensor) -> None:
    """After a write to a replayed view: write its root, and the root's root."""
    if type(tensor) is not _ReplayedDTensor:
        return
    replay, _ = tensor._pending
    root, value = replay.root, _slot.__get__(tensor)
    if type(root) is _ReplayedDTensor:
        value = value.clone()  # it may share local memory with the root, which is made again below
        _slot.__set__(tensor, value)
    written = replay.put(root, _wrap(value, tensor._spec))
    if written is None:
        written = _put_whole(replay, tensor)
    goal = root._spec.with_meta(written._spec.tensor_meta)
    root._local_tensor.copy_(redistribute_local(written._local_tensor, written._spec, goal))
    for changed in (tensor, root):
        if type(changed) is _ReplayedDTensor:
            seen = _version(changed)
            # Autograd counts the write only after this call.
            changed._pending = changed._pending[0], None if seen is None else seen + 1
    _write_back(root)


def _put_whole(replay: Replay, tensor: DTensor) -> DTensor:
    """The root of a view with the view's value in its place, by way of the whole on every rank."""
    root, whole = replay.root, _replicated(tensor._spec)
    value = redistribute_local(_slot.__get__(tensor), tensor._spec, whole)
    root_whole = _replicated(root._spec)
    root_value = redistribute_local(root._local_tensor, root._spec, root_whole)
    if root_value is root._local_tensor:
        root_value = root_value.clone()
    replay.of(root_value).copy_(value)
    return _wrap(root_value, root_whole)


def _replicated(spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(spec.mesh, (Replicate(),) * len(spec.mesh_info.sizes), contiguous_meta(spec.shape, spec.dtype))


DTensor._op_dispatcher = OpDispatcher(DTensor, _wrap, _wrap_view, _write_back)
DTensor.__torch_dispatch__ = staticmethod(
    hot_path(DTensor, DTensor._op_dispatcher.hot, DTensor._op_dispatcher.dispatch)
)

before_first_use(install_overrides)


def _is_param(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_param", False)


def _rebuild(local: Tensor, spec: DTensorSpec, requires_grad: bool, is_param: bool) -> DTensor:
    tensor = _wrap(local, spec)
    if is_param:
        return torch.nn.Parameter(tensor, requires_grad)  # type: ignore[return-value]
    return tensor.requires_grad_(requires_grad)


def _spec_like(spec: DTensorSpec, placements: Placements) -> DTensorSpec:
    """The spec of the same tensor with other placements."""
    try:
        return _cached_spec_like(spec, placements if isinstance(placements, P) else tuple(placements))
    except TypeError:  # not a list of placements: let it be refused by name
        return _make_spec_like(spec, placements)


def _make_spec_like(spec: DTensorSpec, placements: Placements) -> DTensorSpec:
    """Fresh data is row-major; unmoved data stays as it is."""
    normal, order = normalize_placements(spec.mesh_info, placements, spec.ndim)
    target = DTensorSpec(spec.mesh, normal, spec.tensor_meta, order)
    if target.layout is spec.layout:
        return target
    return target.with_meta(contiguous_meta(spec.shape, spec.dtype))


_cached_spec_like = lru_cache(maxsize=16384)(_make_spec_like)


class _PendingDTensor(DTensor):
    """A DTensor whose data is still under way. On first use it waits and becomes an ordinary DTensor."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        complete: Any = self._pending
        object.__setattr__(self, "__class__", DTensor)
        local: Tensor = complete()
        object.__setattr__(self, "_local_tensor", local)
        return local


def _pending(complete: Callable[[], Tensor], device: torch.device, spec: DTensorSpec) -> DTensor:
    shape, stride, dtype = spec.tensor_meta
    tensor = _make_wrapper(_PendingDTensor, shape, stride, dtype=dtype, device=device)
    tensor._spec = spec
    # A finalizer, so that a result that nobody uses is waited for too; the backend warns of others at exit.
    tensor._pending = weakref.finalize(tensor, complete)
    return tensor


def plan(source: DTensor | DTensorSpec, target: DTensorSpec | Placements) -> SpecPlan:
    """What it would take to redistribute a tensor: `print(plan(x, [Replicate()]))` shows steps and bytes."""
    spec = source._spec if isinstance(source, DTensor) else source
    return plan_between(spec, target if isinstance(target, DTensorSpec) else _spec_like(spec, target))


# ---- autograd edges ------------------------------------------------------------------------------------------------


def _moved(
    local: Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool, dtype: torch.dtype | None
) -> DTensor:
    if dtype is not None and dtype != source.dtype:
        local = local.to(dtype)
        source, target = (spec.with_meta(spec.tensor_meta._replace(dtype=dtype)) for spec in (source, target))
    if async_op:
        return _pending(start_redistribute(local, source, target), local.device, target)
    moved = redistribute_local(local, source, target)
    if moved is local and source.tensor_meta != target.tensor_meta:
        target = target.with_meta(source.tensor_meta)  # what did not move lies in memory as it lay
    return _wrap(moved, target)


class _Redistribute(QuickFunction):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        target: DTensorSpec,
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> DTensor:
        ctx.source, ctx.backward_dtype, ctx.async_op = tensor._spec, backward_dtype, async_op
        return _moved(tensor._local_tensor, tensor._spec, target, async_op, forward_dtype)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        wanted = ctx.source.cotangent()
        grad = grad if isinstance(grad, DTensor) else _made_by_formula(grad, wanted)
        dtype = ctx.backward_dtype or grad.dtype
        target = wanted.with_meta(wanted.tensor_meta._replace(dtype=grad.dtype))
        moved = grad._to_spec(target, ctx.async_op, dtype)
        return moved.to(ctx.source.dtype), None, None, None, None


class _FromLocal(QuickFunction):
    """`data` is what the local tensor became on the mesh: the same, a copy on its device, or one for each rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, data: Tensor, spec: DTensorSpec, grad_spec: DTensorSpec) -> DTensor:
        ctx.grad_spec, ctx.device, ctx.share = grad_spec, local.device, _share(spec)
        return _wrap(data, spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        grad = grad if isinstance(grad, DTensor) else _made_by_formula(grad, ctx.grad_spec)
        local = grad._to_spec(_with_dtype(ctx.grad_spec, grad.dtype)).to_local()
        local = local * ctx.share if ctx.share != 1.0 else local
        return local.to(ctx.device), None, None, None


def _grad_spec_of_local(spec: DTensorSpec, grad_placements: Placements | None) -> DTensorSpec:
    """How the gradient of a tensor reaches the local tensors it was made of."""
    if grad_placements is None:
        for axis, op in spec.layout.partial:
            if op not in ("sum", "avg"):
                raise InputError(
                    f"from_local of {spec!r} with gradients: {op} over {spec.mesh_info.names[axis]} depends on what "
                    "other ranks hold, which a local gradient does not see",
                    "reduce before from_local, pass grad_placements, or detach the local tensor",
                )
        return spec.cotangent()
    grad_spec = _spec_like(spec, grad_placements)
    places = spec.mesh_info.coordinates if spec.mesh_info.simulated else (spec.mesh_info.coordinate,)
    for at in places:
        if grad_spec.local_shape(at) != spec.local_shape(at):
            raise InputError(
                f"grad_placements {list(grad_spec.placements)} of {spec!r} give local gradients of shape "
                f"{list(grad_spec.local_shape(at))} for local tensors of shape {list(spec.local_shape(at))}",
                "a gradient has the shape of its tensor: cut the same dims",
            )
    return grad_spec


def _share(spec: DTensorSpec) -> float:
    """What an operand contributes to the value: one part in n of an average over n ranks."""
    return 1.0 / math.prod(spec.mesh_info.sizes[axis] for axis, op in spec.layout.partial if op == "avg")


class _ToLocal(QuickFunction):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_spec: DTensorSpec) -> Tensor:
        ctx.grad_spec = grad_spec
        mark_exposed(tensor)
        return tensor._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec = _with_dtype(ctx.grad_spec, grad.dtype)
        # A local gradient may lie in memory in any way; views of it must be legal where they are for the whole.
        order = memory_order(spec.tensor_meta)
        grad = on_mesh(grad, spec.mesh_info)
        grad = grad.contiguous() if order is None else in_memory_order(grad, order)
        if torch.is_grad_enabled() and grad.requires_grad:
            return _FromLocal.apply(grad, grad.detach(), spec, spec.cotangent()), None
        return _wrap(grad, spec), None


def _with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    return spec if spec.dtype == dtype else spec.with_meta(spec.tensor_meta._replace(dtype=dtype))


def _reduce_gradient_of(leaf: DTensor) -> None:
    """Give a leaf's gradient the leaf's own placements, once, when it arrives."""
    if hasattr(leaf, "_home"):  # it was frozen for a while, and has its hook
        leaf._home.spec = leaf._spec
        return
    # The hook lives on the leaf and must not keep it alive; a weak reference would keep modules from swapping it.
    home = leaf._home = Home(leaf._spec)

    def hook(grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        wanted = home.spec.cotangent()
        if not isinstance(grad, DTensor):
            return _made_by_formula(grad, wanted)._to_spec(_with_dtype(wanted, grad.dtype))
        if grad._spec.layout is wanted.layout:
            return None
        target = home.target(grad._spec)
        return None if target.layout is grad._spec.layout else grad._to_spec(target)

    leaf.register_hook(hook)


def _made_by_formula(grad: Tensor, spec: DTensorSpec) -> DTensor:
    """A plain gradient, such as the zeros of a constant function: PyTorch's formulas make it alike on all ranks."""
    plain = torch.zeros_like(grad) if grad._is_zerotensor() else grad.detach()
    return _wrap(on_mesh(plain, spec.mesh_info), _with_dtype(_replicated(spec), grad.dtype))


# What a file of distributed tensors names, so that torch.load(..., weights_only=True) reads it.
torch.serialization.add_safe_globals(
    [_rebuild, rebuild_spec, Shard, InterleavedShard, Replicate, Partial, ShardOrderEntry]
)

# The optimizers' fast paths, and the clipping of gradients, take the classes named here.
_types: list[type[Any]]
for _types in (_optimized_types, _clipped_types):  # type: ignore[assignment]
    if DTensor not in _types:
        _types.append(DTensor)
