"""fully_shard, and the methods of the modules it is applied to; names and arguments are those of PyTorch's.

>>> with shardwise.simulate(8):
...     mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
...     for block in model.blocks:
...         fully_shard(block, mesh=mesh)
...     fully_shard(model, mesh=mesh)
...     optimizer = torch.optim.AdamW(model.parameters())
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..nn.replaced import replacement_of
from ..sharding.placement import Shard
from .axes import data_axes
from .group import ParameterGroup
from .parameter import Owner, ShardedParameter
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .schedule import Schedule
from .state import STATE, ModuleState, state_of, states_below

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method", "schedule"]

PlacementFn = Callable[[nn.Parameter], Shard | None]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard the parameters of a module over a mesh, and gather them while the module runs.

    The parameters in `module.parameters()` that no earlier call has taken form one group: one all-gather brings them,
    one reduce-scatter reduces their gradients. So call it for submodules first, then for what is around them. `module`
    may be a list of modules, which then form one group.

    `mesh` has one axis, which shards, or two, of which the first replicates. Without it, all ranks shard. Parameters
    that are DTensors already, over other axes of the same root mesh, stay sharded there.

    After the forward pass the parameters are freed, and gathered again in backward: `reshard_after_forward=True`. With
    False they are kept; with a number of ranks, so many neighbouring ranks keep them together. None frees them except
    in the outermost module, which backward begins with.

    Inputs may be local tensors of each rank, whose gradients are averaged over the ranks, or DTensors on a mesh that
    has these axes: the program is then that of one device, and gradients are those of its loss.
    """
    modules = _as_modules(module)
    axes = data_axes(mesh)
    device = _device(axes.mesh_info.device_type)
    for each in modules:
        if state_of(each) is not None:
            raise InputError("fully_shard was called twice for one module", "call it once, with all its arguments")
    group = ParameterGroup(type(modules[0]).__name__, axes, device, mp_policy, offload_policy)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    found, moved = _free_parameters(modules, ignored)
    _move_buffers(modules, device)
    group.shard([(name, p, owners, _dim_of(name, p, shard_placement_fn)) for name, p, owners in found], moved)
    state = ModuleState(modules, group, _checked_reshard(reshard_after_forward, axes.ranks))
    for each in modules:
        each.__dict__[STATE] = state
        cls: Any = type(each)
        each.__class__ = _fsdp_class(cls)
    return module


class UnshardHandle:
    """A gather under way: `wait()` returns once the module has its gathered parameters."""

    def __init__(self, state: ModuleState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait for the gather, and let the module have the parameters."""
        if self._state is not None:
            self._state.gather("forward")
            self._state.group.show_gathered(self._state.inputs)
            self._state = None


class FSDPModule:
    """The methods that `fully_shard` adds to a module. With `recurse`, they act on the modules below it as well."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group. With `async_op`, `wait()` of the result ends the gather."""
        state = self._state()
        handle = UnshardHandle(state)
        if async_op:
            state.prefetch("forward")
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of this module's group."""
        self._state().free("forward")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward pass ends the step; otherwise reductions may stay under way after it."""
        self._state().find_root().is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. Without, each rank adds up its own, and communicates nothing."""
        for state in self._states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are reduced over the axis that replicates, or only over the one that shards."""
        for state in self._states(recurse):
            state.settings.over_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Set whether parameters are freed after the forward pass."""
        for state in self._states(recurse):
            state.reshard_after_forward = _checked_reshard(reshard_after_forward, state.group.axes.ranks)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after the backward pass."""
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules whose gathers start when this module's forward pass begins, in the place of the next one."""
        self._state().forward_prefetch = [module._state() for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules whose gathers start when this module's backward pass begins, in the place of the next one."""
        self._state().backward_prefetch = [module._state() for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of gradients over ranks is divided by, in the place of their number."""
        self._state().settings.divide_factor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only sum, with divisions as ops of their own."""
        self._state().settings.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters without a gradient are reduced as zeros, because other ranks may have used them."""
        for state in self._states(recurse):
            state.settings.unused_as_zeros = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: object = None) -> None:
        """Set a function that gets each flat buffer of reduced gradients before the parameters do."""
        self._state().settings.hook = hook

    def reset_iter_state(self) -> None:
        """Forget what a forward or backward pass that raised an error has left, gradients that wait included."""
        for state in self._states(recurse=True):
            state.reset()

    def set_post_optim_event(self, event: object) -> None:
        """Accepted, and not needed: gathers wait for what the current stream has to do before them."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted, and not needed: there are no staging buffers."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs the parameters of this group. That of an embedding alone does not."""
        self._state().unshard_in_backward = unshard_in_backward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module, whose parameters are sharded and have memory of their own."""
        for state in self._states(recurse=True):
            state.free("forward")
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _state(self) -> ModuleState:
        state = state_of(self)  # type: ignore[arg-type]
        assert state is not None
        return state

    def _states(self, recurse: bool) -> Sequence[ModuleState]:
        return states_below([self]) if recurse else [self._state()]  # type: ignore[list-item]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a module gather and free parameters as its `forward` does. Nothing for other modules."""
    state = state_of(module)
    if state is None:
        return
    original = getattr(module, method_name)
    index = next(i for i, each in enumerate(state.modules) if each is module)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.pre_forward(index, args, kwargs)
        return state.post_forward(index, original(*args, **kwargs))

    setattr(module, method_name, method)


def schedule(module: nn.Module) -> Schedule:
    """What was gathered, freed and reduced in the last step of a module, in order."""
    state = state_of(module)
    if state is None:
        raise InputError("schedule got a module without fully_shard", "call fully_shard(module) first")
    root = state.find_root()
    return root.schedule if len(root.schedule) else root.last_schedule


# ---- arguments -------------------------------------------------------------------------------------------------------


def _as_modules(module: Any) -> list[nn.Module]:
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


def _checked_reshard(value: bool | int | None, ranks: int) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or not 1 < value < ranks or ranks % value:
        fitting = [count for count in range(2, ranks) if ranks % count == 0]
        raise InputError(
            f"reshard_after_forward={value!r}, with {ranks} ranks that shard",
            f"pass True, False, None or a number of ranks that divides them: {fitting or 'there is none here'}",
        )
    return value


def _free_parameters(
    modules: Iterable[nn.Module], ignored: set[int]
) -> tuple[list[tuple[str, nn.Parameter, list[Owner]]], list[ShardedParameter]]:
    """The parameters that belong to no group yet, each with its first name and all its owners.

    The second result are parameters of groups below that a module outside of them shares: their groups lose them.
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
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in ignored or id(parameter) in inner:
                    continue
                tied = inner.get(id(replacement_of(parameter)))
                if tied is not None:
                    moved[id(tied[1])] = tied[1]
                    tied[1].owners.append((module, name))
                    module._parameters[name] = tied[1].sharded
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
        raise InputError(f"shard_placement_fn returned {placement!r} for {name!r}", "return Shard(dim), or None")
    return placement.dim


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for root in modules:
        for buffer in root.buffers():
            if not buffer.is_meta and buffer.device.type != device.type:
                buffer.data = buffer.to(device)


@functools.cache
def _fsdp_class(cls: Any) -> Any:
    """The class of a module, with the methods of FSDPModule."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
