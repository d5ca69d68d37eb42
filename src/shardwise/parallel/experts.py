"""Styles of model hubs for a mixture of experts whose weights are sharded.

Experts are one module with a parameter for all of them: `[experts, features, features]`. It is called with tokens, and
the experts and weights that were chosen for each. Depending on how the parameters are sharded it runs

- on local tensors, if all are sharded along the hidden features. A rank computes its share of the features of every
  expert, for all tokens it holds, and the results are summed. No op is dispatched, and no weight is communicated.
- on distributed tensors otherwise, as when each rank holds some of the experts, or when a bias is replicated.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch import pytree
from ..nn.distribute import distribute_parameters
from ..sharding.placement import AnyShard, InterleavedShard, Partial, Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from .axis import StyleAxis
from .base import ParallelStyle
from .converters import InputConverter, OutputConverter
from .hooks import Args, Kwargs, register_input_hook, register_output_hook
from .local_parameters import LocalParameters
from .prepare import PrepareModuleOutput


class ExpertsParallel(ParallelStyle):
    """Run experts on the parameters that the plan has sharded; inputs and outputs are replicated over the axis."""

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        distribute_parameters(module, device_mesh, None, self.src_data_rank)
        inputs = InputConverter(axis, Replicate(), Replicate())
        outputs = OutputConverter(axis, None, Replicate(), self.use_local_output)
        if _shards_hidden_features(module, axis):
            _LocalExperts(axis, inputs).register(module)
        else:
            register_input_hook(module, [inputs], inputs)
        register_output_hook(module, outputs)
        return module


class SummedParallel(ParallelStyle):
    """Sum the local outputs of a module over the axis.

    A module that owns sharded parameters itself runs as experts do; otherwise its children have styles of their own.
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style: ParallelStyle = PrepareModuleOutput(
            output_layouts=Partial(), desired_output_layouts=Replicate(), use_local_output=self.use_local_output
        )
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            style = ExpertsParallel(use_local_output=self.use_local_output)
        style.axis, style.src_data_rank = self.axis, self.src_data_rank
        return style._apply(module, device_mesh)


class IdentityExpert(ParallelStyle):
    """For an expert that returns its input: divide a local input by the number of ranks, whose outputs are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)

        def divide(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            first = args[0]
            summed = not isinstance(first, DTensor) or axis.is_local(first)
            return (first / axis.size, *args[1:]) if summed else args

        module.register_forward_pre_hook(divide)
        return module


def _shards_hidden_features(module: nn.Module, axis: StyleAxis) -> bool:
    """Return whether all parameters are sharded over the axis along the hidden features of the experts.

    They are if they shard blocks of one size: `up` and `down` one block of hidden features, `[gate; up]` two. A plan
    may also shard `[gate; up]` as one block. Then the two halves of a local shard are not gates and ups, and the module
    cannot run on local tensors.
    """
    sizes: set[int] = set()
    for parameter in module.parameters():
        placement = parameter.placements[axis.index] if isinstance(parameter, DTensor) else Replicate()
        if not isinstance(placement, AnyShard) or placement.dim == 0:
            return False
        blocks = placement.blocks if isinstance(placement, InterleavedShard) else 1
        sizes.add(parameter.shape[placement.dim] // blocks)
    return len(sizes) == 1


class _LocalExperts:
    """Hooks that make inputs and parameters local, and the output a Partial sum again."""

    def __init__(self, axis: StyleAxis, inputs: InputConverter) -> None:
        self.axis, self.inputs = axis, inputs
        self.finish: list[Callable[[Tensor], Tensor]] = []
        self.parameters: list[LocalParameters] = []

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Take the local tensors of all inputs and parameters."""
        args, kwargs = pytree.tree_map_only(Tensor, self.inputs.convert, (args, kwargs))
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, DTensor)]
        local = _local_inputs(self.axis, tensors)
        swap = LocalParameters(dict.fromkeys((name for name, _ in module.named_parameters()), local.parameter))
        self.finish.append(local.output)
        self.parameters.append(swap)
        swap.enter(module)
        return pytree.tree_map_only(DTensor, local.input, (args, kwargs))

    def leave(self, module: nn.Module, _: object, output: object) -> object:
        """Put the parameters back, and wrap the output."""
        if not self.parameters:
            return output
        self.parameters.pop().leave(module)
        finish = self.finish.pop()
        return pytree.tree_map_only(Tensor, finish, output)


class _Local:
    """How the inputs and parameters of experts become local, and the output distributed.

    Over the style's axis, inputs are replicated and their gradients Partial, since a rank computes with its features
    only. Over the other axes of the mesh nothing changes: local tensors are distributed over them.
    """

    def __init__(self, axis: StyleAxis) -> None:
        self.axis = axis

    def input(self, tensor: DTensor) -> Tensor:
        return self.axis.to_local(tensor, grad=Partial())

    def parameter(self, tensor: DTensor) -> Tensor:
        return self.axis.to_local(tensor)

    def output(self, tensor: Tensor) -> Tensor:
        return self.axis.from_local(tensor, Partial())


class _LocalTokens(_Local):
    """The same for tokens that may be sharded over the other axes: they become local there, too.

    Experts compute each token on its own, so a rank needs only its own tokens.
    """

    def __init__(self, axis: StyleAxis, tokens: DTensor) -> None:
        super().__init__(axis)
        self.size = tokens.shape[0]
        self.placements: list[Placement] = [
            p if p == Shard(0) and index != axis.index else Replicate() for index, p in enumerate(tokens.placements)
        ]

    def _with_axis(self, placement: Placement) -> list[Placement]:
        placements = list(self.placements)
        placements[self.axis.index] = placement
        return placements

    def input(self, tensor: DTensor) -> Tensor:
        tensor = tensor.redistribute(placements=self.placements)
        return tensor.to_local(grad_placements=self._with_axis(Partial()))

    def parameter(self, tensor: DTensor) -> Tensor:
        summed: list[Placement] = [Partial() if isinstance(p, AnyShard) else Replicate() for p in self.placements]
        summed[self.axis.index] = tensor.placements[self.axis.index]
        return tensor.to_local(grad_placements=summed)

    def output(self, tensor: Tensor) -> Tensor:
        shape = (self.size, *tensor.shape[1:])
        return DTensor.from_local(tensor, self.axis.mesh, self._with_axis(Partial()), shape=shape)


def _local_inputs(axis: StyleAxis, tensors: list[DTensor]) -> _Local:
    """Return how to make these inputs local: over all axes if they are tokens with the indices of their experts."""
    routed = any(not t.is_floating_point() for t in tensors) and len({t.shape[:1] for t in tensors}) == 1
    return _LocalTokens(axis, tensors[0]) if routed and not axis.is_only_axis else _Local(axis)
