"""The methods of modules under `fully_shard`, by the names of PyTorch's FSDPModule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from ..errors import InputError
from .state import ModuleState, state_of, states_below

__all__ = ["FSDPModule", "UnshardHandle", "checked_reshard"]


class UnshardHandle:
    """A gather in flight: `wait()` returns once the module has its gathered parameters.

    >>> handle = fully_shard(model, mesh=mesh["dp"]).unshard(async_op=True)
    >>> handle.wait()
    >>> model[0].weight.shape                               # the gathered parameter
    torch.Size([8, 4])
    """

    def __init__(self, state: ModuleState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait for the gather, and set the gathered parameters on the module."""
        if self._state is not None:
            self._state.gather("forward")
            self._state.group.show_gathered(self._state.inputs)
            self._state = None


class FSDPModule:
    """The methods that `fully_shard` adds to a module. With `recurse`, they act on the modules below it as well.

    >>> model = fully_shard(model, mesh=mesh["dp"])
    >>> isinstance(model, FSDPModule)
    True
    >>> model.set_requires_gradient_sync(False)             # for all microbatches but the last
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group. With `async_op`, return a handle to `wait()` for the gather."""
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
        """Set whether the next backward pass ends the step; otherwise reductions may be in flight after it."""
        self._state().find_root().is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. If not, each rank accumulates its own, without communication."""
        for state in self._states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are reduced over the axis that replicates, or only over the one that shards."""
        for state in self._states(recurse):
            state.settings.over_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Set whether parameters are freed after the forward pass."""
        for state in self._states(recurse):
            state.reshard_after_forward = checked_reshard(reshard_after_forward, state.group.axes.ranks)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after the backward pass."""
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules whose gathers start when this module's forward pass begins; by default the next module."""
        self._state().forward_prefetch = [module._state() for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules whose gathers start when this module's backward pass begins; by default the next module."""
        self._state().backward_prefetch = [module._state() for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of the sum of gradients over ranks; by default the number of ranks."""
        self._state().settings.divide_factor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only sum, with the division as a separate op."""
        self._state().settings.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters without a gradient are reduced as zeros, because other ranks may have used them."""
        for state in self._states(recurse):
            state.settings.unused_as_zeros = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: object = None) -> None:
        """Set a function that is called with each flat buffer of reduced gradients before parameters get them."""
        self._state().settings.hook = hook

    def reset_iter_state(self) -> None:
        """Reset after a forward or backward pass that raised an error; gradients not yet reduced are dropped."""
        for state in self._states(recurse=True):
            state.reset()

    def set_post_optim_event(self, event: object) -> None:
        """Do nothing: gathers already wait for earlier work on the current stream."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing: there are no staging buffers."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Do nothing: there are no staging buffers."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing: gathers and reductions share a process group."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing: gradients are reduced from their own memory, one group at a time."""

    def set_custom_all_gather(self, comm: object) -> None:
        """Raise an error: custom all-gathers are not supported."""
        raise InputError(
            "fully_shard does not support custom collectives: it gathers each parameter in place by one coalesced "
            "collective, without a staging buffer that another one could fill",
            "remove the call",
        )

    set_custom_reduce_scatter = set_custom_all_gather

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs the parameters of this group. That of an embedding alone does not."""
        self._state().unshard_in_backward = unshard_in_backward

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a copy of the module, whose sharded parameters have their own memory."""
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


def checked_reshard(value: bool | int | None, ranks: int) -> bool | int | None:
    """Return this value of `reshard_after_forward`, or raise an error if it is invalid."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or not 1 < value < ranks or ranks % value:
        fitting = [count for count in range(2, ranks) if ranks % count == 0]
        raise InputError(
            f"reshard_after_forward={value!r}, with {ranks} ranks that shard, does not divide them into smaller groups",
            f"pass True, False, None{f', or one of {fitting}' if fitting else ''}",
        )
    return value
