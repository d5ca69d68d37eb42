"""DTensor: one tensor whose data is sharded over a mesh of devices.

>>> with shardwise.simulate(4):
...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
...     x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
...     x.shards[3]
tensor([6., 7.])
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.dynamo import in_graph
from .._torch.modes import count_modes
from .._torch.optim import accept_class
from .._torch.proxies import call_in_graph
from .._torch.transforms import transforms_active
from .._torch.wrapper import make_wrapper, no_torch_function, outside_inference_mode
from ..comm.groups import adopt, before_first_use
from ..comm.mesh_change import MeshChange, plan_mesh_change
from ..comm.on_ranks import shard_outside
from ..comm.plan import SpecPlan
from ..comm.redistribute import plan_redistribution, redistribute_local
from ..dispatch.dispatcher import OpDispatcher
from ..dispatch.modes import modes
from ..dispatch.view_call import ViewCall
from ..dispatch.watch import mark_exposed
from ..errors import InputError
from ..overrides.install import install_overrides
from ..sharding.base import DTensorBase
from ..sharding.drawn import Drawn
from ..sharding.layout import Coordinate
from ..sharding.mesh import current_mesh, mesh_info_of
from ..sharding.placement import (
    InterleavedShard,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    ShardOrder,
    ShardOrderEntry,
)
from ..sharding.spec import DTensorSpec, contiguous_meta, rebuild_spec
from ..world import RankTensor
from . import exported
from .autograd import FromLocal, ToLocal, grad_spec_of_local, to_spec
from .changed_shape import ChangingShape
from .exported import exporting
from .from_local import check_plain_tensor, copy_to_replicas, of_members, on_mesh, spec_of_local, without_grad
from .global_values import GlobalValues
from .handed_out import hand_out, hand_out_new
from .hooks import Hooks, mark_if_in_memory
from .leaf_gradient import LeafGradient, reduce_gradient_of
from .other_mesh import spec_on, target_on
from .pieces import Pieces
from .saved import loaded_shard
from .sources import Replayed, replayed, set_local
from .transformed import from_local_transformed

__all__ = ["DTensor"]

_strided = torch.strided
_records_gradients = torch.is_grad_enabled
_data: Any = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad


class DTensor(ChangingShape, GlobalValues, Pieces, Hooks):
    """A tensor sharded over a mesh. It has the shape of the global tensor; each rank holds its local shard.

    >>> x = distribute_tensor(torch.arange(8.0), mesh, P("tp"))
    >>> x.shape, x.placements, x.spec
    (torch.Size([8]), (Replicate(), Shard(dim=0)), f32[8@tp])
    >>> (x * 2).shards[1]                              # rank 1 holds the second half
    tensor([ 8., 10., 12., 14.])
    >>> (x * 2).full_tensor().tolist()
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    """

    # No __slots__ of its own: the staging of asynchronous checkpoints copies those that `x.__slots__` names.
    __torch_function__ = no_torch_function

    _leaf_gradient: LeafGradient | None = None
    _op_dispatcher: OpDispatcher

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
        """Return the tensor with this spec and, on this rank, this local shard. Neither checks shapes nor copies.

        A class that derives from DTensor may define `__torch_dispatch__`, and call this one. Results are DTensors.
        """
        if local_tensor.requires_grad and not requires_grad:
            raise InputError(
                "the DTensor constructor got a local tensor that requires grad",
                "use DTensor.from_local, which is differentiable, or detach it",
            )
        if not spec.mesh_info.adopted:
            adopt(spec.mesh)
        mark_if_in_memory(local_tensor)  # the caller holds it
        tensor = DTensor.wrap(local_tensor, spec, kind=cls)
        return tensor.requires_grad_() if requires_grad else tensor

    @staticmethod
    def wrap(local: Tensor, spec: DTensorSpec, offset: int | None = None, kind: type[DTensor] | None = None) -> DTensor:
        """Return the distributed tensor with this local shard and this spec. Nothing is checked or copied.

        `offset` is the `storage_offset()` of a view.
        """
        shape, stride, dtype = spec.tensor_meta
        tensor: DTensor = make_wrapper(kind or DTensor, shape, stride, offset, None, dtype, _strided, local.device)
        tensor._shard = local
        tensor._spec = spec
        return tensor

    @classmethod
    def wrap_view(
        cls, local: Tensor, spec: DTensorSpec, base: DTensor, replay: ViewCall | None, offset: int
    ) -> DTensor:
        """Return a view of `base` with this local shard; `replay` recomputes a shard with its own memory."""
        if torch.is_inference_mode_enabled() and not base.is_inference():
            with outside_inference_mode():  # a view of a normal tensor is one, too
                return cls.wrap_view(local, spec, base, replay, offset)
        made = cls.wrap(local, spec, offset) if replay is None else replayed(replay, local, spec, offset)
        return made  # type: ignore[return-value]

    # ---- to and from local tensors ------------------------------------------------------------------------------

    @staticmethod
    @in_graph
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
        """Return the distributed tensor whose shard on this rank is `local_tensor`. Differentiable.

        Without `shape`, the shards of all ranks are assumed to be of equal size, and nothing is communicated. With
        `run_check=True` the ranks compare shapes, dtypes and requires_grad, so that the global shape is right for
        uneven shards, and copy the first rank's data along replicated axes. `grad_placements` are those of the gradient
        that goes back to `local_tensor`.
        """
        if exporting():
            mesh = device_mesh if device_mesh is not None else current_mesh()
            given = (run_check, shape, stride, grad_placements)
            return exported.from_local(check_plain_tensor(local_tensor, "from_local"), mesh, placements, *given)
        return DTensor._from_local(local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements)

    @staticmethod
    def _from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None,
        placements: Placements | None,
        run_check: bool,
        shape: Sequence[int] | None,
        stride: Sequence[int] | None,
        grad_placements: Placements | None,
    ) -> DTensor:
        local = check_plain_tensor(local_tensor, "from_local")
        if isinstance(local, DTensor):
            raise InputError("from_local got a DTensor", "pass its local shard, x.to_local(), or use x.redistribute")
        if transforms_active():
            given = {"run_check": run_check, "shape": shape, "stride": stride, "grad_placements": grad_placements}
            mesh = device_mesh if device_mesh is not None else current_mesh()
            return from_local_transformed(local, mesh, {"placements": placements, **given})
        mesh_info = adopt(device_mesh if device_mesh is not None else current_mesh())
        if mesh_info.simulated:
            local = of_members(local, mesh_info)
        data = on_mesh(without_grad(local), mesh_info)
        spec = spec_of_local(data, mesh_info, placements, shape, stride, run_check, local)
        if mesh_info.outside:
            data = shard_outside(spec.ndim, spec.dtype, data.device)
        elif run_check:
            data = copy_to_replicas(data, spec)
        mark_exposed(data)  # the caller holds it
        if local.requires_grad and _records_gradients():
            return FromLocal.apply(local, data, spec, grad_spec_of_local(spec, grad_placements))
        return DTensor.wrap(data, spec)

    def to_local(self, *, grad_placements: Placements | None = None) -> Tensor:
        """Return the local shard of this rank, as an ordinary tensor. Differentiable.

        `grad_placements` say which global gradient the gradients of the local tensors are shards of; by default it is
        sharded like this tensor, and replicated where this tensor is Partial.
        """
        return exported.to_local(self, grad_placements) if exporting() else self._to_local(grad_placements)

    def _to_local(self, grad_placements: Placements | None) -> Tensor:
        if self.requires_grad and _records_gradients():
            spec = self._spec
            return ToLocal.apply(
                self, spec.cotangent() if grad_placements is None else spec.with_placements(grad_placements)
            )
        if count_modes():
            made = call_in_graph(hand_out_new, self)
            if made is not NotImplemented:
                return made
        return hand_out(self)

    def full_tensor(self, *, grad_placements: Placements | None = None) -> Tensor:
        """Return the global tensor, as an ordinary tensor on every rank, with its dims in the same order in memory.

        Differentiable.
        """
        if self._spec.is_replicated():
            return self.to_local(grad_placements=grad_placements)
        gathered = to_spec(self, self._spec.replicated())
        if gathered.requires_grad or exporting():
            return gathered.to_local(grad_placements=grad_placements)
        if count_modes():
            made = call_in_graph(hand_out_new, gathered)
            if made is not NotImplemented:
                return made
        # In memory of its own, unless there is one rank.
        return hand_out(self) if gathered._local_shard is self._local_shard else gathered._local_shard

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same tensor with other placements, on its mesh or on another one. Differentiable, twice.

        Between meshes, each rank of the target receives exactly what it lacks. All ranks of both meshes call this; a
        rank that is in one of them alone has an empty local tensor on the other.

        With `async_op=True` the last collective is still in flight on return, and is waited for on first use.
        `forward_dtype` is the dtype of the communication and of the result, `backward_dtype` that of the communication
        of the gradient, which then takes this tensor's dtype.
        """
        spec = self._spec
        if placements is None:
            raise InputError(
                "redistribute got no placements",
                "pass one placement for each mesh axis, e.g. placements=[Replicate(), ...], or P(...)",
            )
        if device_mesh is None or device_mesh is spec.mesh:
            target = spec.with_placements(placements)
        else:
            target = target_on(device_mesh, placements, self)
        return to_spec(self, target, async_op, forward_dtype, backward_dtype)

    # ---- the spec and the shards ----------------------------------------------------------------------------

    @property
    def spec(self) -> DTensorSpec:
        """Mesh, placements, shard order, shape, stride and dtype, in one value that prints in one line."""
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor is sharded over."""
        return self._spec.mesh_info.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis: `from_local` with these rebuilds the tensor."""
        return self._spec.placements_alone

    @property
    def shard_order(self) -> ShardOrder:
        """For each sharded dim the axes that shard it, major to minor."""
        return self._spec.shard_order

    @property
    def shards(self) -> dict[int, Tensor]:
        """The local shards by rank: of all ranks of the mesh in a simulated world, else of this one."""
        local = self._local_shard
        mark_exposed(local)
        if isinstance(local, RankTensor):
            return dict(zip(self._spec.mesh_info.ranks, local.shards, strict=True))
        return {dist.get_rank(): local}

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        grad = grad or (", requires_grad=True" if self.requires_grad else "")
        return f"DTensor({self._spec!r} on {self._spec.mesh_info!r}{grad}, local={self._local_shard!r})"

    _repr_html_ = Drawn._repr_html_

    # ---- data and requires_grad -------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """The same data, detached."""
        # A replayed view finds writes to its root by version counters, and `.data` would have a counter of its own.
        return self.detach() if isinstance(self._source, Replayed) else _data.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, DTensor):
            other = self._distributed_data(other)
        local, source = other._local_shard, other._source
        _data.__set__(self, other)
        set_local(self, local)  # a replayed view is no longer a view of its root
        self._spec = other._spec
        if isinstance(source, Replayed):
            del self._shard
            self._source = source
        if self._leaf_gradient is not None:
            self._leaf_gradient.change(other._spec)

    def _distributed_data(self, plain: Tensor) -> DTensor:
        """Return a plain tensor with the placements of this one, if plain tensors are known to be replicated."""
        if not modes.implicit_replication:
            raise InputError(
                f"the data of {self._spec!r} was set to a plain tensor of shape {list(plain.shape)}",
                "distribute it first, x.data = distribute_tensor(data, x.device_mesh, x.placements), or take plain "
                "tensors as replicated inside `with shardwise.experimental.implicit_replication():`",
            )
        spec, data = self._spec, plain.detach().contiguous()
        meta = contiguous_meta(data.shape, data.dtype)
        target = DTensorSpec(spec.mesh, spec.placements, meta, spec.shard_order)
        local = redistribute_local(on_mesh(data, spec.mesh_info), target.replicated(), target)
        return DTensor.wrap(local, target)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Set `requires_grad`, as for any tensor. A leaf's gradient takes the leaf's own placements."""
        changes = requires_grad and not self.requires_grad
        super().requires_grad_(requires_grad)
        if changes and self.is_leaf:
            reduce_gradient_of(self)
        return self

    def _set_requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    # Read by PyTorch's own getter, without a function in Python around it.
    requires_grad = cast(
        bool, property(_requires_grad.__get__, _set_requires_grad, doc="Whether gradients flow to it.")
    )

    # ---- copies and files -----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise InputError(
                f"deepcopy of {self._spec!r}, which is not a leaf: its grad_fn cannot be copied",
                "detach it first: copy.deepcopy(x.detach())",
            )
        copied = _rebuild(copy.deepcopy(self._local_shard, memo), self._spec, self.requires_grad, _is_param(self))
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        spec = self._spec
        return _load, (self._local_tensor, spec, self.requires_grad, _is_param(self), spec.mesh_info.coordinate)


DTensorBase.concrete = DTensor
DTensor._op_dispatcher = OpDispatcher(DTensor)
DTensor.__torch_dispatch__ = staticmethod(DTensor._op_dispatcher.torch_dispatch)


def plan(
    source: DTensor | DTensorSpec, target: DTensorSpec | Placements, *, device_mesh: DeviceMesh | None = None
) -> SpecPlan | MeshChange:
    """Return the plan of a redistribution: `print(plan(x, [Replicate()]))` shows steps and bytes.

    With `device_mesh`, the placements are on that mesh.

    >>> print(plan(zeros(8, 4, device_mesh=mesh, placements=P("dp")), [Replicate(), Replicate()]))
    f32[8@dp, 4] -> f32[8, 4]   1 collective, 64 B received by a rank
      1. all-gather           over dp               64 B   f32[8, 4]
    """
    spec = source._spec if isinstance(source, DTensor) else source
    if not isinstance(target, DTensorSpec):
        if device_mesh is None or mesh_info_of(device_mesh) is spec.mesh_info:
            target = spec.with_placements(target)
        else:
            target = spec_on(adopt(device_mesh).mesh, target, spec)
    if target.mesh_info is spec.mesh_info:
        return plan_redistribution(spec, target)
    return plan_mesh_change(spec, target)


def _is_param(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _rebuild(local: Tensor, spec: DTensorSpec, requires_grad: bool, is_param: bool) -> DTensor:
    tensor = DTensor.wrap(local, spec)
    if is_param:
        return torch.nn.Parameter(tensor, requires_grad)  # type: ignore[return-value]
    return tensor.requires_grad_(requires_grad)


def _load(local: Tensor, spec: DTensorSpec, requires_grad: bool, is_param: bool, saved_at: Coordinate) -> DTensor:
    """Return a tensor from its pickled form; `saved_at` is the coordinate of the rank that pickled it."""
    return _rebuild(loaded_shard(local, spec, saved_at), spec, requires_grad, is_param)


before_first_use(install_overrides)
accept_class(DTensor)
# What a file of distributed tensors names, so that torch.load(..., weights_only=True) reads it.
torch.serialization.add_safe_globals(
    [_load, rebuild_spec, Shard, InterleavedShard, Replicate, Partial, ShardOrderEntry]
)
