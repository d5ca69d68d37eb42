"""replicate: data parallelism with replicated parameters; gradients are reduced in buckets.

>>> mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
>>> replicate(model, mesh=mesh, bucket_cap_mb=50)
>>> model(local_batch).mean().backward()                       # as DistributedDataParallel: gradients are averaged
>>> model(distribute_tensor(batch, mesh, P("dp"))).mean().backward()     # as on one device
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt, common_root
from ..errors import InputError, MeshError, PlacementError
from ..sharding.mesh import MeshInfo, current_mesh, mesh_of_all_ranks
from ..sharding.placement import Placement, Replicate
from ..tensor.dtensor import DTensor
from ..tensor.gradient_buckets import bytes_of
from .local_view import LocalView, Owner, Shown
from .parameters import Ties, distribute_parameter, keep_ties, own_tensors
from .replaced import copy_attributes

# Options of DistributedDataParallel that are accepted and ignored.
_NOT_NEEDED = {
    *("device_id", "device_ids", "output_device", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"),
    *("check_reduction", "skip_all_reduce_unused_params", "batched_grad_copy"),
}


def replicate(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    device_mesh: DeviceMesh | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    **options: object,
) -> nn.Module:
    """Replicate the parameters of a module over a mesh, and reduce gradients over it in buckets.

    The parameters become DTensors, replicated over the axes of `mesh` (by default one axis of all ranks), with the data
    of the first rank. Inputs may be

    - DTensors on a mesh that has these axes: the program is then that of one device, and gradients are those of its
      loss, also for an uneven batch.
    - local tensors, a batch of each rank: the module computes on local tensors, and gradients are averaged over the
      ranks. Buffers that the module has written are copied from the first rank after each call, unless
      `broadcast_buffers=False`.

    Parameters that are DTensors on a mesh with these axes (`parallelize_module(model, mesh, plan)`) stay unchanged,
    and the plain ones are replicated on that mesh; such a module takes DTensors. Those on a mesh of other axes
    (`mesh["tp"]`) are replicated over these as well, and local inputs see them on their own mesh. Parameters that one
    of these axes shards (experts on `mesh["ep"]`, with a mesh `(dp, ep)`) stay sharded over it.

    Submodules that were replicated before, perhaps over another mesh, stay unchanged.

    The module gets the methods of `ReplicateModule`. `bucket_cap_mb` is the size of its buckets in MiB, by default that
    of `bucket_gradients`. Options of DistributedDataParallel that are not needed here, such as
    `find_unused_parameters`, are accepted and ignored.

    >>> model = replicate(model, mesh=mesh["dp"])
    >>> model[0].weight.spec
    f32[8, 4]
    """
    unknown = sorted(set(options) - _NOT_NEEDED)
    if unknown:
        raise InputError(
            f"replicate has no option {', '.join(unknown)}",
            f"use ignored_modules, mesh, ignored_params, bucket_cap_mb, broadcast_buffers or init_sync; accepted and "
            f"ignored are {', '.join(sorted(_NOT_NEEDED))}",
        )
    if isinstance(module, ReplicateModule):
        raise InputError("replicate was called twice for one module", "call it once, with all its arguments")
    data = adopt(_mesh(mesh if mesh is not None else device_mesh))
    skipped = {id(each) for other in ignored_modules or () for each in other.modules()}
    skipped |= {id(parameter) for parameter in ignored_params or ()}
    for other in module.modules():
        if isinstance(other, ReplicateModule):  # by an earlier call, perhaps over another mesh
            skipped |= {id(each) for each in (*other.modules(), *other.parameters(), *other.buffers())}
    shown = _distribute(module, data, skipped, 0 if init_sync else None)
    cls = type(module)
    module.__class__ = type(f"Replicate{cls.__name__}", (ReplicateModule, cls), {})
    module.requires_gradient_sync = True  # type: ignore[assignment]
    if bucket_cap_mb is not None:
        for parameter in module.parameters():
            if isinstance(parameter, DTensor) and parameter._leaf_gradient is not None:
                parameter._leaf_gradient.bucket_size = bytes_of(int(bucket_cap_mb * (1 << 20)))
    if shown:
        LocalView(data, shown, broadcast_buffers).watch(module)
    return module


class ReplicateModule:
    """The methods that `replicate` adds to a module.

    >>> model = replicate(model, mesh=mesh["dp"])
    >>> with model.no_sync():
    ...     model(torch.ones(2, 4)).sum().backward()        # each rank adds up its own gradients
    >>> model(torch.ones(2, 4)).sum().backward()            # reduces the sums
    """

    requires_gradient_sync: bool

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. If not, each rank accumulates its own, without communication.

        The next backward pass that reduces then reduces the accumulated gradients.
        """
        self.requires_gradient_sync = requires_gradient_sync
        for parameter in self.parameters(recurse):  # type: ignore[attr-defined]
            if isinstance(parameter, DTensor) and parameter._leaf_gradient is not None:
                parameter._leaf_gradient.waits = not requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: no communication is in flight when a backward pass has returned."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of this module inside, without reducing them."""
        before = self.requires_gradient_sync
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(before)


# ---- distributing ----------------------------------------------------------------------------------------------------


def _mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the given mesh, that of a `with mesh:` block, or a mesh of one axis over all ranks."""
    if mesh is not None:
        return mesh
    try:
        return current_mesh()
    except MeshError:
        return mesh_of_all_ranks()


def _distribute(module: nn.Module, data: MeshInfo, skipped: set[int], source: int | None) -> list[Shown]:
    """Replicate parameters and buffers, and return those to replace during calls on local inputs.

    The list is empty if some parameters are on a mesh that has the data axes: such a module takes DTensors only.
    """
    shown: list[Shown] = []
    with keep_ties(module) as ties:
        found = [
            (owner, name, tensor)
            for owner in module.modules()
            if id(owner) not in skipped
            for name, tensor in own_tensors(owner).items()
            if id(tensor) not in skipped
        ]
        everywhere = {t._spec.mesh_info: None for *_, t in found if isinstance(t, DTensor) and _has(t, data)}
        if len(everywhere) > 1:
            raise MeshError(
                f"replicate got a module whose parameters are on several meshes with the axes {data.names}: "
                f"{list(everywhere)}",
                "call replicate for each submodule whose parameters are on one mesh",
            )
        target = next(iter(everywhere), data)
        for owner, name, tensor in found:
            if not isinstance(tensor, DTensor):
                distribute_parameter(owner, name, target.mesh, [Replicate()] * target.mesh.ndim, source)
                shown.append(Shown(Owner(owner), name, None))
            elif _has(tensor, data):
                _check_replicated(name, tensor, data)
            elif own_tensors(owner)[name] is tensor:  # not yet replaced under another name
                _replicate_over(tensor, data, ties, owner, name)
                shown.append(Shown(Owner(owner), name, tensor._spec))
            else:
                shown.append(Shown(Owner(owner), name, tensor._spec))
    return [] if everywhere else shown


def _has(tensor: DTensor, data: MeshInfo) -> bool:
    return set(data.names) <= set(tensor._spec.mesh_info.names)


def _check_replicated(name: str, tensor: DTensor, data: MeshInfo) -> None:
    names = tensor._spec.mesh_info.names
    for axis, placement in zip(names, tensor.placements, strict=True):
        if axis in data.names and not placement.is_replicate():
            raise PlacementError(
                f"replicate over {data!r} got the parameter {name!r}, {tensor._spec!r}, which is not replicated over "
                f"{axis}",
                "replicate over axes that do not shard parameters, or use fully_shard or shard_parameters",
            )


def _replicate_over(tensor: DTensor, data: MeshInfo, ties: Ties, owner: nn.Module, name: str) -> None:
    """Replace a parameter on a mesh of other axes by one on the mesh of all of them, with the same local shard."""
    own = tensor._spec.mesh_info
    root = common_root(own, data)
    wanted = {*own.names, *data.names}
    axes = tuple(axis for axis in (root and root.mesh_dim_names) or () if axis in wanted)
    if root is None or len(axes) < len(wanted):
        raise MeshError(
            f"replicate over {data!r} got the parameter {name!r}, which is on {own!r}: no mesh has the axes of both",
            'make one mesh, init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")), and pass slices of it: '
            'mesh["tp"] to parallelize_module, mesh["dp"] to replicate',
        )
    joined = root if axes == root.mesh_dim_names else root[axes]
    placements = dict(zip(own.names, tensor.placements, strict=True))
    spread: list[Placement] = [placements.get(axis, Replicate()) for axis in axes]
    new = DTensor.from_local(tensor._local_shard, joined, spread, shape=tensor.shape, stride=tensor.stride())
    made: Any = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    own_gradient = made._leaf_gradient
    copy_attributes(tensor, made)
    made._leaf_gradient = own_gradient
    ties.replace(tensor, made, owner, name)
