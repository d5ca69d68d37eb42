"""The style of experts that are sharded over a mesh axis: tokens travel to the ranks of their experts, and back.

    parallelize_module(model, mesh["ep"], {"layers.*.moe.experts": ExpertParallel()})

A rank holds some of the experts and some of the tokens. Before the module runs, its tokens are sent to the ranks that
hold their experts; the module's own code runs on the tokens that arrive and on the local experts; its results are sent
back. No token is dropped, and tokens are not padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.token_route import ExpertAxis
from ..errors import InputError
from ..nn.parameters import distribute_parameter, keep_ties
from ..sharding.placement import Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from ..world import rank_factories
from .axis import StyleAxis
from .base import ParallelStyle
from .expert_call import Arguments, ExpertCall, Runner
from .expert_list import ExpertList, stack_experts
from .hooks import Args, Kwargs
from .local_parameters import LocalParameters, owner_of

EXPERT_AXIS = "ep"


class ExpertParallel(ParallelStyle):
    """Shard experts over an axis, and route tokens to them with an all-to-all each way.

    The axis is the mesh's only one, or the one named "ep"; `style.over("dp")` names another. The module has parameters
    whose first dim is the number of experts, such as `[experts, out, in]`, and is called in one of two ways:

    - `experts(tokens, index, weights)`, as in transformers: the chosen experts `[tokens, k]`, and the weights that
      multiply their outputs. Returns the weighted sum of each token.
    - `experts(rows, counts)`, as in torchtitan: rows sorted by expert, and the number of rows of each expert. Returns
      the outputs in the same order.

    An `nn.ModuleList` of experts can be called in the first way after the style is applied. Its parameters are stacked;
    the keys of its state dict stay the same.

    Plain tokens are those of this rank, whose number may differ between ranks, and so is the output. Tokens that are a
    DTensor may be sharded or replicated over the axis and over others; the output has the same placements.

    Gradients of the experts are summed over the tokens of all ranks. With plain tokens, and a loss that is a mean over
    the tokens of one rank, data parallel training averages gradients over ranks: `gradient_reduction="mean"` does so
    here. With distributed tokens the loss is that of the global batch, and a sum is always right.

    `features` shards the hidden features of all experts over another axis, too:
    `ExpertParallel(features={"w1": Shard(1), "w3": Shard(1), "w2": Shard(2)}, features_axis="tp")`.

    >>> parallelize_module(moe, mesh["ep"], {"experts": ExpertParallel()})
    """

    def __init__(
        self,
        *,
        gradient_reduction: str = "sum",
        features: Mapping[str, Placement] | None = None,
        features_axis: str = "tp",
    ) -> None:
        if gradient_reduction not in ("sum", "mean"):
            raise InputError(f"ExpertParallel has no gradient_reduction={gradient_reduction!r}", "use 'sum' or 'mean'")
        self.gradient_reduction, self.features, self.features_axis = gradient_reduction, features, features_axis

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        named = device_mesh.mesh_dim_names or ()
        axis = StyleAxis(device_mesh, self.axis or (EXPERT_AXIS if EXPERT_AXIS in named else None))
        if isinstance(module, nn.ModuleList):
            stack_experts(module)
        experts = _number_of_experts(module)
        summed = {axis.mesh_info.axis_index(self.features_axis)} if self.features else set()
        with keep_ties(module):
            for path, parameter in list(module.named_parameters()):
                placements = self._placements(path, parameter, experts, axis)
                _shard(module, path, parameter, device_mesh, placements, self.src_data_rank)
        call = ExpertCall(
            axis, ExpertAxis(axis.mesh_info, axis.index, experts), summed, self.gradient_reduction == "mean"
        )
        _RoutedExperts(call).register(module)
        return module

    def _placements(self, path: str, parameter: Tensor, experts: int, axis: StyleAxis) -> tuple[Placement, ...]:
        """Return the placements of a parameter: experts are sharded over the axis, other parameters replicated."""
        on_axis = Shard(0) if parameter.dim() and parameter.shape[0] == experts else Replicate()
        given = parameter.placements if isinstance(parameter, DTensor) else axis.parameter_placements(Replicate())
        placements = [on_axis if index == axis.index else placement for index, placement in enumerate(given)]
        if self.features:
            name = path.removeprefix("stacked.")
            if name not in self.features:
                raise InputError(
                    f"features names {', '.join(self.features)}, and the experts also have {name!r}: outputs are "
                    f"summed over {self.features_axis}, so that an unsharded parameter would count once for each rank",
                    "shard every parameter along the hidden features, or leave features out",
                )
            placements[axis.mesh_info.axis_index(self.features_axis)] = self.features[name]
        return tuple(placements)


def _number_of_experts(module: nn.Module) -> int:
    """Return the number of experts: the first dim of a module's stacked parameters."""
    if isinstance(module, ExpertList):
        return len(module)
    stacked = {parameter.shape[0] for parameter in module.parameters() if parameter.dim() >= 3}
    if len(stacked) != 1:
        has = ", ".join(f"{name} {list(p.shape)}" for name, p in module.named_parameters()) or "none"
        raise InputError(
            f"ExpertParallel cannot find the number of experts of a {type(module).__name__}, the first dim of all its "
            f"3-D parameters; its parameters are {has}",
            "apply the style to the module that owns the weights of all experts, [experts, out, in], or to an "
            "nn.ModuleList of experts",
        )
    return stacked.pop()


def _shard(
    module: nn.Module,
    path: str,
    parameter: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    src_data_rank: int | None,
) -> None:
    """Distribute a parameter, or redistribute one that is distributed already."""
    owner, name = owner_of(module, path)
    if isinstance(parameter, DTensor) and parameter.placements != placements:
        with torch.no_grad():
            moved = parameter.redistribute(placements=placements)
        setattr(owner, name, nn.Parameter(moved, requires_grad=parameter.requires_grad))
    else:
        distribute_parameter(owner, name, mesh, placements, src_data_rank)


class _RoutedExperts:
    """Hooks that route a module's tokens and run the module on local experts."""

    def __init__(self, call: ExpertCall) -> None:
        self.call = call
        self.running: list[tuple[Runner, ExitStack]] = []

    def register(self, module: nn.Module) -> None:
        # Functions, not methods: copy.deepcopy of a module copies the objects of methods, and with them the mesh.
        module.register_forward_pre_hook(lambda *given: self.enter(*given), with_kwargs=True)
        module.register_forward_hook(lambda module, _, output: self.leave(output), always_call=True)

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Send tokens to their experts, and set local parameters on the module."""
        runner = self.call.start(_arguments(module, args, kwargs), isinstance(module, ExpertList))
        inner = runner.inner_arguments
        with ExitStack() as stack:
            stack.enter_context(_local_experts(module, runner, self.call.experts))
            if self.call.experts.mesh_info.simulated:
                stack.enter_context(rank_factories())  # ranks have different numbers of rows
            self.running.append((runner, stack.pop_all()))
        return inner, {}

    def leave(self, output: object) -> object:
        """Put the parameters back, and send the results to where the tokens came from."""
        if not self.running:
            return output
        runner, stack = self.running.pop()
        stack.close()
        if output is not None and not isinstance(output, Tensor):
            raise InputError(
                f"experts returned a {type(output).__name__}: only the rows of a tensor can be sent back",
                "return one tensor, with a row for each row that the experts got",
            )
        return None if output is None else runner.finish(output)


@contextmanager
def _local_experts(module: nn.Module, runner: Runner, experts: ExpertAxis) -> Iterator[None]:
    """Give the module local parameters, and the largest number of local experts on a rank, inside the block."""
    parameters = LocalParameters(dict.fromkeys((name for name, _ in module.named_parameters()), runner.local_parameter))
    numbers = [name for name in _NAMES_OF_COUNTS if getattr(module, name, None) == experts.experts]
    try:
        parameters.enter(module)
        for name in numbers:
            setattr(module, name, experts.most)
        yield
    finally:
        parameters.leave(module)
        for name in numbers:
            setattr(module, name, experts.experts)


_NAMES_OF_COUNTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts")
"""Attributes with a module's number of experts; while it runs, they hold the largest number of experts on a rank."""


def _arguments(module: nn.Module, args: Args, kwargs: Kwargs) -> Arguments:
    """Return the tensors of a call by position; keyword arguments are put in the order of `forward`."""
    values = [*args, *kwargs.values()]
    if kwargs and not isinstance(module, ExpertList):
        forward: Callable[..., object] = module.forward
        values = list(inspect.signature(forward).bind(*args, **kwargs).arguments.values())
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) != len(values) or len(tensors) not in (2, 3):
        raise InputError(
            f"{type(module).__name__} was called with {', '.join(type(value).__name__ for value in values)}",
            "call experts as experts(tokens, index, weights) or experts(rows, counts)",
        )
    return Arguments(*tensors)
