"""What `fully_shard` does when a module runs: before and after its forward pass, before and after its backward pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import pytree
from .._torch.autograd import QuickFunction, call_after_backward, in_backward
from ..errors import InputError
from ..nn.parameters import replicate_rest
from ..sharding.mesh import MeshInfo
from ..sharding.recording import is_recording
from ..tensor.dtensor import DTensor
from .group import ParameterGroup
from .reduce import ReduceSettings, Reduction
from .schedule import Order, Schedule


class Root:
    """What all modules below one root share: the order in which they run, and reductions under way."""

    def __init__(self, state: ModuleState, states: Sequence[ModuleState]) -> None:
        self.state = state
        self.states = list(states)
        self.order = Order()
        self.schedule = Schedule()
        self.last_schedule = Schedule()
        self.inputs: MeshInfo | None = None
        self.reductions: list[Reduction] = []
        self.in_backward = False
        self.is_last_backward = True

    def begin_step(self) -> None:
        """Begin another schedule, if a step has ended."""
        if self.schedule.events and not self.order.finished:
            self.last_schedule, self.schedule = self.schedule, Schedule()

    def begin_backward(self) -> None:
        """Note that a backward pass has begun; what is left is done at its end."""
        if not self.in_backward:
            self.in_backward = True
            call_after_backward(self.end_backward)

    def end_backward(self) -> None:
        """Reduce and free what is left, and give the sharded parameters their gradients."""
        self.in_backward = False
        for state in self.states:
            if state.phase == "backward" or state.group.has_gradients():
                state.post_backward()
            state.phase = "idle"
        if self.is_last_backward:
            self.finish_reductions()
            self.order.finished.clear()
            for state in self.states:
                if state.group.is_under_way():
                    state.free("backward")

    def add_reduction(self, reduction: Reduction) -> None:
        """Let a reduction run beside the backward pass of the next module, and end those of earlier modules."""
        self._advance_reductions()
        self.reductions.append(reduction)

    def finish_reductions(self) -> None:
        """Wait for all reductions."""
        while self.reductions:
            self._advance_reductions()

    def _advance_reductions(self) -> None:
        for reduction in self.reductions:
            reduction.advance()
        self.reductions = [reduction for reduction in self.reductions if not reduction.finished]


class ModuleState:
    """The group of parameters of one call of `fully_shard`, and what its modules are doing."""

    def __init__(
        self, modules: Sequence[nn.Module], group: ParameterGroup, reshard_after_forward: bool | int | None
    ) -> None:
        self.modules = list(modules)
        self.group = group
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.requires_gradient_sync = True
        self.settings = ReduceSettings()
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.root: Root | None = None
        self.phase = "idle"
        self.inputs: MeshInfo | None = None
        """The mesh over which the inputs of the last forward pass were distributed."""
        self._to_run = set(range(len(self.modules)))
        self._is_data_mesh: dict[MeshInfo, bool] = {}
        for index, module in enumerate(self.modules):
            self._register(module, index)

    def _register(self, module: nn.Module, index: int) -> None:
        before, after = _Before(self, index), _After(self, index)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, prepend=False)

        module.register_state_dict_pre_hook(self._before_state_dict)

    def _before_state_dict(self, *_: object) -> None:
        self.free("forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.root = None
        copied.modules = copy.deepcopy(self.modules, memo)
        copied.group = copy.deepcopy(self.group, memo)
        copied.settings = copy.copy(self.settings)
        copied.forward_prefetch = copy.deepcopy(self.forward_prefetch, memo)
        copied.backward_prefetch = copy.deepcopy(self.backward_prefetch, memo)
        return copied

    def reset(self) -> None:
        """Be as before the first pass."""
        self.phase = "idle"
        self.free("forward")
        self._to_run = set(range(len(self.modules)))
        for parameter in self.group.parameters:
            if parameter.has_gradient():
                parameter.take_gradient()
        for buffers in self.group.buffers:
            buffers.unreduced.clear()
        root = self.find_root()
        root.reductions.clear()
        root.order = Order()
        root.in_backward, root.inputs = False, None

    # ---- the root -----------------------------------------------------------------------------------------------

    def find_root(self) -> Root:
        """The root of this module: the outermost `fully_shard` module that has run around it, or itself."""
        if self.root is None:
            states = states_below(self.modules)
            self.root = Root(self, states)
            names = {id(module): name for name, module in self.modules[0].named_modules()}
            for state in states:
                state.root = self.root
                state.group.name = names.get(id(state.modules[0]), state.group.name) or "(root)"
        return self.root

    def is_root(self) -> bool:
        """Whether this module is the outermost one."""
        return self.find_root().state is self

    # ---- gathering and freeing ----------------------------------------------------------------------------------

    def gather(self, phase: str) -> None:
        """Have the parameters gathered, and wait for them."""
        if not self.group.gathered and not self.group.is_under_way():
            self.group.start_gather()
            self._note(phase, "gather")
        self.group.finish_gather()

    def prefetch(self, phase: str) -> None:
        """Start to gather the parameters."""
        if not self.group.gathered and not self.group.is_under_way():
            self.group.start_gather()
            self._note(phase, "prefetch")

    def free(self, phase: str, neighbours: int | None = None) -> None:
        """Free the gathered parameters; with `neighbours`, that many ranks keep them together."""
        if self.group.free(neighbours):
            self._note(phase, "free")

    def _note(self, phase: str, action: str) -> None:
        if self.group.parameters:
            self.find_root().schedule.add(phase, self.group.name, action)

    # ---- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the parameters, and let the module have them."""
        root = self.find_root()
        if is_recording():
            raise InputError(
                "a step with modules of fully_shard was given to erase, which records local code, not memory that "
                "is freed and gathered again",
                "run the step without erase, or erase a step whose parameters are distributed by "
                "shard_parameters(model, mesh) or a plan",
            )
        if self.phase == "backward":  # recomputed: backward has gathered the parameters already
            self.group.show_gathered(self.inputs)
            return self._cast_inputs(args, kwargs)
        first = len(self._to_run) == len(self.modules)
        inputs = self._mesh_of_inputs(args, kwargs)
        if self.is_root() and first and not in_backward():
            root.begin_step()
            root.order.begin_forward()
            root.inputs = inputs
        self.inputs = inputs = inputs if inputs is not None else root.inputs
        self._set_reduction(inputs)
        self.gather("forward")
        if first and not in_backward():
            following = root.order.forward(self)
            for state in self.forward_prefetch or ([following] if following is not None else []):
                state.prefetch("forward")
        self.group.show_gathered(inputs)
        if inputs is not None:
            self._distribute_buffers(inputs)
        args, kwargs = self._cast_inputs(args, kwargs)
        return self._mark_inputs(args, kwargs) if first else (args, kwargs)

    def post_forward(self, index: int, output: Any) -> Any:
        """Free the parameters, unless backward is to use them; gather them again when it begins."""
        if self.phase == "backward":
            return self._cast_output(output)
        root = self.find_root()
        self._to_run.discard(index)
        last = not self._to_run
        output = self._cast_output(output)
        recorded = self._mark_outputs(output)
        if last:
            self._to_run = set(range(len(self.modules)))
            if recorded:
                root.order.finished.append(self)
            if self._frees_after_forward(recorded) and not in_backward():
                self.free("forward", self.neighbours if recorded else None)
        if self.is_root():
            root.inputs = None
            for state in root.states:  # those that were expected to run, and did not
                if state.group.is_under_way():
                    state.free("forward")
        return output

    def _frees_after_forward(self, recorded: bool) -> bool:
        if self.reshard_after_forward is None:
            return not (self.is_root() and recorded)
        return self.reshard_after_forward is not False

    @property
    def neighbours(self) -> int | None:
        """The number of ranks that keep the parameters between forward and backward, if it is not all or one."""
        kept = self.reshard_after_forward
        return None if kept is None or isinstance(kept, bool) else kept

    def _mesh_of_inputs(self, args: Any, kwargs: Any) -> MeshInfo | None:
        """The mesh over which inputs are distributed, if it has the axes of data parallel."""
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, DTensor) and self._has_data_axes(value._spec.mesh_info):
                return value._spec.mesh_info
        return None

    def _has_data_axes(self, mesh_info: MeshInfo) -> bool:
        found = self._is_data_mesh.get(mesh_info)
        if found is None:
            own = self.group.axes
            found = self._is_data_mesh[mesh_info] = own.inside(mesh_info) is not None
            if not found and set(own.mesh_info.names) & set(mesh_info.names):
                raise InputError(
                    f"fully_shard over {own.mesh_info!r} got an input that is distributed over {mesh_info!r}, which "
                    "has some of its axes",
                    "distribute the inputs over a mesh that has all of them, or pass local tensors",
                )
        return found

    def _set_reduction(self, inputs: MeshInfo | None) -> None:
        mean = inputs is None
        if mean != self.settings.mean and self.group.has_gradients():
            raise InputError(
                "gradients of local inputs, which are averaged over ranks, and of distributed inputs, which are "
                "summed, would be added up",
                "pass inputs of one kind while gradients accumulate",
            )
        self.settings.mean = mean

    def _distribute_buffers(self, inputs: MeshInfo) -> None:
        """Replicate plain buffers over the mesh of the inputs."""
        for module in self.modules:
            for submodule in module.modules():
                if any(
                    buffer is not None and not isinstance(buffer, DTensor) for buffer in submodule._buffers.values()
                ):
                    _replicate_buffers(submodule, inputs)

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.group.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.group.mp_policy.output_dtype
        return output if dtype is None else _cast(output, dtype)

    # ---- backward -----------------------------------------------------------------------------------------------

    def _mark_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Let the backward pass of the module end where the gradients of its inputs are known."""
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [i for i, value in enumerate(leaves) if isinstance(value, Tensor) and value.requires_grad]
        if not places:
            return args, kwargs
        for i, value in zip(places, _EndOfBackward.apply(self, *(leaves[i] for i in places)), strict=True):
            leaves[i] = value
        return pytree.tree_unflatten(leaves, structure)

    def _mark_outputs(self, output: Any) -> bool:
        """Let the backward pass of the module begin where the gradients of its outputs are known."""
        found = False
        if torch.is_grad_enabled():
            for value in pytree.tree_leaves(output):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(self.pre_backward)
                    found = True
        return found

    def pre_backward(self, gradient: object = None) -> None:
        """Gather the parameters again, and start the gather of the module that follows."""
        if self.phase == "backward":
            return
        root = self.find_root()
        root.begin_backward()
        self.phase = "backward"
        following = root.order.backward(self)
        if self.unshard_in_backward:
            self.gather("backward")
            self.group.show_gathered(self.inputs)
        for state in self.backward_prefetch or ([following] if following is not None else []):
            if state.unshard_in_backward:
                state.prefetch("backward")

    def post_backward(self) -> None:
        """Reduce the gradients, and free the parameters."""
        root = self.find_root()
        self.phase = "done"
        if self.reshard_after_backward:
            self.free("backward")
        if not self.group.has_gradients():
            return
        if not self.requires_gradient_sync:
            dtype = self.group.mp_policy.reduce_dtype
            if dtype is not None:
                for parameter in self.group.parameters:
                    parameter.accumulate_in(dtype)
            return
        self._note("backward", "reduce")
        root.add_reduction(Reduction(self.group, self.settings))


class _Before:
    """The forward pre-hook of a module."""

    def __init__(self, state: ModuleState, index: int) -> None:
        self.state, self.index = state, index

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.state.pre_forward(self.index, args, kwargs)


class _After:
    """The forward hook of a module."""

    def __init__(self, state: ModuleState, index: int) -> None:
        self.state, self.index = state, index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.state.post_forward(self.index, output)


class _EndOfBackward(QuickFunction):
    """The identity, in front of a module; in backward, what follows it is done with the module's parameters."""

    @staticmethod
    def forward(ctx: Any, state: ModuleState, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs."""
        ctx.state = state
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The gradients."""
        ctx.state.post_backward()
        return (None, *gradients)


STATE = "_fully_shard_state"
"""The attribute of a module that holds its state."""


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a module of `fully_shard`; None for other modules."""
    found: ModuleState | None = module.__dict__.get(STATE)
    return found


def states_below(modules: Sequence[nn.Module]) -> list[ModuleState]:
    """The states of all modules of `fully_shard` among these and their submodules, in the order of `modules()`."""
    found = {}
    for module in modules:
        for submodule in module.modules():
            state = state_of(submodule)
            if state is not None:
                found[id(state)] = state
    return list(found.values())


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return pytree.tree_map(cast, values)


def _replicate_buffers(module: nn.Module, mesh_info: MeshInfo) -> None:
    parameters = dict(module._parameters)
    module._parameters.clear()  # only buffers are left to replicate
    try:
        replicate_rest(module, mesh_info.mesh, None)
    finally:
        module._parameters.update(parameters)
