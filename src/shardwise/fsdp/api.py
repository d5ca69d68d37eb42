"""fully_shard, with the names and arguments of PyTorch's.

>>> with shardwise.simulate(8):
...     mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
...     for block in model.blocks:
...         fully_shard(block, mesh=mesh)
...     fully_shard(model, mesh=mesh)
...     optimizer = torch.optim.AdamW(model.parameters())
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch.modules import parameters_of
from ..errors import InputError
from ..nn.replaced import replacement_of
from ..sharding.placement import Shard
from .axes import DataParallelMeshDims, data_axes
from .group import ParameterGroup
from .module import FSDPModule, checked_reshard
from .parameter import Owner, ShardedParameter
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .schedule import Schedule
from .state import STATE, ModuleState, state_of, states_below

__all__ = ["fully_shard", "register_fsdp_forward_method", "schedule", "share_comm_ctx"]

PlacementFn = Callable[[nn.Parameter], Shard | None]


def fully_shard(
    module: nn.Module | Iterable[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module over a mesh, and gather them while the module runs.

    The parameters in `module.parameters()` that no earlier call has taken form one group: one all-gather gathers them,
    one reduce-scatter reduces their gradients. So call it for submodules first, then for the modules that contain them.
    `module` may be a list of modules, which then form one group.

    `mesh` has one axis, which shards, or two: the first replicates, the second shards. The default is all ranks.
    Parameters that are DTensors already, over other axes of the same root mesh, stay sharded there.

    With `reshard_after_forward=True` the parameters are freed after the forward pass, and gathered again in backward.
    With False they stay gathered; with a number n, every n neighbouring ranks hold one copy together. None (the
    default) frees them except in the outermost module, with which backward begins.

    Inputs may be local tensors of each rank, whose gradients are averaged over the ranks, or DTensors on a mesh that
    has these axes: the program is then that of one device, and gradients are those of its loss.

    With `dp_mesh_dims=DataParallelMeshDims(shard="dp")`, `mesh` may have any axes, and those named there are used.

    >>> for layer in (model[0], model[2]):
    ...     layer = fully_shard(layer, mesh=mesh["dp"])
    >>> model = fully_shard(model, mesh=mesh["dp"])
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> model[0].weight.spec, model[0].weight.grad.spec
    (f32[8@dp, 4], f32[8@dp, 4])
    """
    modules = _as_modules(module)
    axes = data_axes(mesh if dp_mesh_dims is None else dp_mesh_dims.slice_of(mesh))
    device = _device(axes.mesh_info.device_type)
    for each in modules:
        if state_of(each) is not None:
            raise InputError("fully_shard was called twice for one module", "call it once, with all its arguments")
    group = ParameterGroup(type(modules[0]).__name__, axes, device, mp_policy, offload_policy)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    found, moved = _free_parameters(modules, ignored)
    _move_buffers(modules, device)
    group.shard([(name, p, owners, _dim_of(name, p, shard_placement_fn)) for name, p, owners in found], moved)
    state = ModuleState(modules, group, checked_reshard(reshard_after_forward, axes.ranks))
    for each in modules:
        each.__dict__[STATE] = state
        cls: type = type(each)
        each.__class__ = _fsdp_class(cls)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a `fully_shard` module gather and free parameters as `forward` does.

    >>> register_fsdp_forward_method(fully_shard(block, mesh=mesh["dp"]), "generate")
    >>> block.generate(torch.ones(2, 4)).shape
    torch.Size([2, 8])
    """
    state = state_of(module)
    if state is None:
        return
    original = getattr(module, method_name)
    bound = isinstance(original, MethodType) and original.__self__ is module
    function = original.__func__ if bound else original
    index = next(i for i, each in enumerate(state.modules) if each is module)

    @functools.wraps(original)
    def method(self: nn.Module, *args: object, **kwargs: object) -> object:
        state = state_of(self)
        assert state is not None
        run = MethodType(function, self) if bound else function
        args, kwargs = state.pre_forward(index, args, kwargs)
        return state.post_forward(index, run(*args, **kwargs))

    setattr(module, method_name, MethodType(method, module))  # a deep copy of the module binds it to the copy


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Do nothing: modules have no streams of their own to share. Accepted for programs written for PyTorch.

    >>> share_comm_ctx([fully_shard(model[0], mesh=mesh["dp"]), fully_shard(model[2], mesh=mesh["dp"])])
    """


def schedule(module: nn.Module) -> Schedule:
    """Return the gathers, frees and reductions in the last step of a module, in order.

    >>> fully_shard(model, mesh=mesh["dp"])(torch.ones(2, 4)).sum().backward()
    >>> print(schedule(model))
    forward   (root)  gather
    backward  (root)  free
    backward  (root)  reduce
    """
    state = state_of(module)
    if state is None:
        raise InputError("schedule got a module without fully_shard", "call fully_shard(module) first")
    root = state.find_root()
    return root.schedule if len(root.schedule) else root.last_schedule


# ---- arguments -------------------------------------------------------------------------------------------------------


def _as_modules(module: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    modules = [module] if isinstance(module, nn.Module) else list(module)
    for each in modules:
        if not isinstance(each, nn.Module) or isinstance(each, (nn.ModuleList, nn.ModuleDict)):
            raise InputError(
                f"fully_shard got a {type(each).__name__}, which has no forward pass",
                "pass modules that are called: fully_shard(block) for each block in the list",
            )
    if not modules:
        raise InputError("fully_shard got an empty list", "pass at least one module")
    return modules


def _device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)


def _free_parameters(
    modules: Iterable[nn.Module], ignored: set[int]
) -> tuple[list[tuple[str, nn.Parameter, list[Owner]]], list[ShardedParameter]]:
    """Return the parameters that belong to no group yet, each with its first name and all its owners.

    The second result lists parameters of groups of submodules that a module outside these shares. They have left their
    groups, to join the group of `modules`.
    """
    found: dict[int, tuple[str, nn.Parameter, list[Owner]]] = {}
    moved: dict[int, ShardedParameter] = {}
    seen: set[int] = set()
    inner = {id(p.sharded): (state.group, p) for state in states_below(list(modules)) for p in state.group.parameters}
    for root in modules:
        for path, module in root.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, parameter in parameters_of(module).items():
                if parameter is None or id(parameter) in ignored or id(parameter) in inner:
                    continue
                tied = inner.get(id(replacement_of(parameter)))
                if tied is not None:
                    moved[id(tied[1])] = tied[1]
                    tied[1].owners.append((module, name))
                    parameters_of(module)[name] = tied[1].sharded
                    continue
                full = f"{path}.{name}" if path else name
                found.setdefault(id(parameter), (full, parameter, []))[2].append((module, name))
    for group, parameter_of_group in inner.values():
        if id(parameter_of_group) in moved:
            group.remove(parameter_of_group)
    return list(found.values()), list(moved.values())


def _dim_of(name: str, parameter: nn.Parameter, placement_of: PlacementFn | None) -> int:
    placement = placement_of(parameter) if placement_of is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise InputError(
            f"shard_placement_fn returned {placement!r} for {name!r}",
            "return Shard(dim), or None; for parameters on another mesh, call fully_shard(submodule, mesh=...) first",
        )
    return placement.dim


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for root in modules:
        for buffer in root.buffers():
            if not buffer.is_meta and buffer.device.type != device.type:
                buffer.data = buffer.to(device)


_made: WeakKeyDictionary[type, ref[type]] = WeakKeyDictionary()
"""The FSDP class of each module class. Keys and values are weak, so that classes made in a function can be freed."""


def _fsdp_class(cls: type) -> type:
    """Return the subclass of a module's class that has the methods of FSDPModule."""
    known = _made.get(cls)
    found = None if known is None else known()
    if found is None:
        found = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        _made[cls] = ref(found)
    return found
