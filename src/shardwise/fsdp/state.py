"""The hooks of `fully_shard` around the forward and the backward pass of a module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from .._torch.autograd import in_backward
from ..errors import InputError
from ..sharding.mesh import MeshInfo
from ..sharding.recording import is_recording
from ..tensor.dtensor import DTensor
from .group import ParameterGroup
from .passing import after_gradients_of, before_gradients_of, cast, replicate_buffers, tensors_in
from .reduce import ReduceSettings, Reduction
from .root import Root
from .schedule import Order

if TYPE_CHECKING:
    from ..dispatch.arguments import Args, Kwargs


class ModuleState:
    """The parameter group of one call of `fully_shard`, and the state of its modules in forward and backward."""

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
        self._with_buffers: set[MeshInfo] = set()
        """The meshes over which the buffers of the modules were replicated, for inputs on them."""
        for index, module in enumerate(self.modules):
            self._register(module, index)

    def _register(self, module: nn.Module, index: int) -> None:
        module.register_forward_pre_hook(partial(self._before, index), prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(self._after, index))

        module.register_state_dict_pre_hook(self._before_state_dict)

    def _before(self, index: int, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return self.pre_forward(index, args, kwargs)

    def _after(self, index: int, module: nn.Module, args: object, output: object) -> object:
        return self.post_forward(index, output)

    def _before_state_dict(self, *_: object) -> None:
        self.free("forward")

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleState:
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.root = None
        copied.modules = copy.deepcopy(self.modules, memo)
        copied.group = copy.deepcopy(self.group, memo)
        copied.settings = copy.copy(self.settings)
        copied.forward_prefetch = copy.deepcopy(self.forward_prefetch, memo)
        copied.backward_prefetch = copy.deepcopy(self.backward_prefetch, memo)
        copied._to_run = set(self._to_run)
        copied._is_data_mesh = dict(self._is_data_mesh)
        copied._with_buffers = set(self._with_buffers)
        return copied

    def reset(self) -> None:
        """Reset to the state before the first pass."""
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
        """Return the root of this module: the outermost `fully_shard` module that ran around it, or itself."""
        if self.root is None:
            states = states_below(self.modules)
            self.root = Root(self, states)
            names = {id(module): name for name, module in self.modules[0].named_modules()}
            for state in states:
                state.root = self.root
                state.group.name = names.get(id(state.modules[0]), state.group.name) or "(root)"
        return self.root

    def is_root(self) -> bool:
        """Return whether this module is the outermost one."""
        return self.find_root().state is self

    # ---- gathering and freeing ----------------------------------------------------------------------------------

    def gather(self, phase: str) -> None:
        """Gather the parameters, and wait for them."""
        if self.group.start_gather():
            self._note(phase, "gather")
        self.group.finish_gather()

    def prefetch(self, phase: str) -> None:
        """Start to gather the parameters."""
        if self.group.start_gather():
            self._note(phase, "prefetch")

    def free(self, phase: str, neighbours: int | None = None) -> None:
        """Free the gathered parameters; with `neighbours`, that many ranks hold one copy together."""
        if self.group.free(neighbours):
            self._note(phase, "free")

    def _note(self, phase: str, action: str) -> None:
        self.find_root().schedule.add(phase, self.group.name, action)

    # ---- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, index: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Gather the parameters, and set them on the module."""
        root = self.find_root()
        if is_recording():
            raise InputError(
                "erase cannot record a step with fully_shard modules: it records local ops, not memory that is freed "
                "and gathered again",
                "run the step without erase, or erase a step whose parameters are distributed by "
                "shard_parameters(model, mesh) or a plan",
            )
        if root.in_backward and not in_backward():  # a backward pass has raised an error
            for state in root.states:
                state.reset()
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
        self.group.free_if_written()
        self.gather("forward")
        if first and not in_backward():
            following = root.order.forward(self)
            for state in self.forward_prefetch or ([following] if following is not None else []):
                state.prefetch("forward")
        self.group.show_gathered(inputs)
        if inputs is not None and inputs not in self._with_buffers:
            self._with_buffers.add(inputs)
            for module in self.modules:
                replicate_buffers(module, inputs)
        cast_inputs = self._cast_inputs(args, kwargs)
        return after_gradients_of(cast_inputs, self.post_backward) if first else cast_inputs

    def post_forward(self, index: int, output: object) -> object:
        """Free the parameters, unless they stay gathered for backward; else backward gathers them again."""
        if self.phase == "backward":
            return cast(output, self.group.mp_policy.output_dtype)
        root = self.find_root()
        self._to_run.discard(index)
        last = not self._to_run
        output = cast(output, self.group.mp_policy.output_dtype)
        recorded = before_gradients_of(output, self.pre_backward)
        if last:
            self._to_run = set(range(len(self.modules)))
            if recorded:
                root.order.finished.append(self)
            if self._frees_after_forward(recorded) and not in_backward():
                self.free("forward", self.neighbours if recorded else None)
        if self.is_root():
            root.inputs = None
            for state in root.states:  # prefetched for modules that did not run
                if state.group.is_under_way():
                    state.free("forward")
        return output

    def _frees_after_forward(self, recorded: bool) -> bool:
        if self.reshard_after_forward is None:
            return not (self.is_root() and recorded)
        return self.reshard_after_forward is not False

    @property
    def neighbours(self) -> int | None:
        """The number of ranks that share one copy of the parameters between forward and backward, or None."""
        kept = self.reshard_after_forward
        return None if kept is None or isinstance(kept, bool) else kept

    def _mesh_of_inputs(self, args: Args, kwargs: Kwargs) -> MeshInfo | None:
        """Return the mesh over which inputs are distributed, if it has the data-parallel axes."""
        for value in tensors_in((args, kwargs)):
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

    def _cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        policy = self.group.mp_policy
        return cast((args, kwargs), policy.param_dtype if policy.cast_forward_inputs else None)

    # ---- backward -----------------------------------------------------------------------------------------------

    def pre_backward(self, gradient: object = None) -> None:
        """Gather the parameters again, and prefetch those of the next module."""
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
        if self.group.outside:
            for parameter in self.group.parameters:
                parameter.drop_gradient()
            return
        if not self.requires_gradient_sync:
            dtype = self.group.mp_policy.reduce_dtype
            if dtype is not None:
                for parameter in self.group.parameters:
                    parameter.accumulate_in(dtype)
            return
        self._note("backward", "reduce")
        root.add_reduction(Reduction(self.group, self.settings))


STATE = "_fully_shard_state"
"""The attribute of a module that holds its state."""


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the `fully_shard` state of a module, or None."""
    found: ModuleState | None = module.__dict__.get(STATE)
    return found


def states_below(modules: Sequence[nn.Module]) -> list[ModuleState]:
    """Return the `fully_shard` states of these modules and their submodules, in the order of `modules()`."""
    found = {}
    for module in modules:
        for submodule in module.modules():
            state = state_of(submodule)
            if state is not None:
                found[id(state)] = state
    return list(found.values())
