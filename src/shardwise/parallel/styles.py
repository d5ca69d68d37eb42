"""The styles that cut or replicate a module's parameters.

>>> parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..nn.parameters import distribute_parameter, replicate_rest
from ..sharding.placement import Placement, Replicate, Shard
from . import cuts
from .axis import StyleAxis
from .hooks import Entrance, Exit
from .style import ParallelStyle


class _CutStyle(ParallelStyle):
    """What styles that cut a module's weight have in common. None stands for the module's own layout."""

    _cut: Callable[[nn.Module], cuts.Cut]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts, self.output_layouts = input_layouts, output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        cut = type(self)._cut(module)
        for name, placement in cut.parameters.items():
            path, _, own = name.rpartition(".")
            owner = module.get_submodule(path)
            distribute_parameter(owner, own, device_mesh, axis.parameter(placement), self.src_data_rank)
        for part in module.modules():
            replicate_rest(part, device_mesh, self.src_data_rank)
        layout = self.input_layouts or cut.input
        known = cut.input_size if layout == cut.input else None
        enter = Entrance(axis, layout, cut.input, dim_size=known)
        hang_inputs(module, [enter] * cut.inputs, Entrance(axis, Replicate(), Replicate()))
        hang_outputs(module, Exit(axis, None, self.output_layouts or cut.output, self.use_local_output))
        return module

    def __repr__(self) -> str:
        said = {name: value for name, value in vars(self).items() if value is not None and name != "src_data_rank"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"


class ColwiseParallel(_CutStyle):
    """Cut a module by the columns of its output: each rank makes a part of the features.

    Plain inputs are taken to have `input_layouts` (replicated unless said), and are replicated before use. The output
    has `output_layouts`: cut in the last dim unless said, for a convolution in the channels. It is a local tensor, or
    a DTensor with `use_local_output=False`.

    nn.MultiheadAttention is cut by heads, its outer projection by rows, and its output is replicated unless said.
    """

    _cut = staticmethod(cuts.colwise)


class RowwiseParallel(_CutStyle):
    """Cut a module by the rows of its transposed weight: each rank reads a part of the features; results are summed.

    Plain inputs are taken to have `input_layouts` (cut in the last dim unless said; an embedding's are replicated), and
    are brought there before use. The output has `output_layouts`, replicated unless said: `Shard(1)` sums by a
    reduce-scatter. It is a local tensor, or a DTensor with `use_local_output=False`.
    """

    _cut = staticmethod(cuts.rowwise)


class SequenceParallel(ParallelStyle):
    """Replicate a module's parameters and let it work on inputs that are cut in the sequence's dim.

    For norms, dropout and whatever treats the elements of a sequence one by one. Plain inputs are taken to be cut
    there. The output is cut there, too: a DTensor, or a local tensor with `use_local_output=True`.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _replicated(self, module, device_mesh, Shard(self.sequence_dim), self.use_local_output)

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence_dim}, use_local_output={self.use_local_output})"


class ReplicateParallel(ParallelStyle):
    """Replicate a module's parameters, its inputs and its outputs: every rank computes the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _replicated(self, module, device_mesh, Replicate(), use_local_output=True)

    def __repr__(self) -> str:
        return "ReplicateParallel()"


def _replicated(
    style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, layout: Placement, use_local_output: bool
) -> nn.Module:
    axis = StyleAxis(mesh, style.axis)
    for part in module.modules():
        replicate_rest(part, mesh, style.src_data_rank)
    hang_inputs(module, [Entrance(axis, layout, layout)], None)
    hang_outputs(module, Exit(axis, layout, layout, use_local_output))
    return module


def hang_inputs(module: nn.Module, leading: list[Entrance], others: Entrance | None) -> None:
    """Prepare the leading arguments of a module, and the other tensors with `others`."""
    names = list(inspect.signature(module.forward).parameters)[: len(leading)]

    def prepare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) == 1 and not kwargs:
            return (leading[0](args[0]),), kwargs
        seen: dict[tuple[int, Entrance | None], Any] = {}  # what was one argument stays one: attention asks for that

        def enter(value: Any, entrance: Entrance | None) -> Any:
            if entrance is None or not isinstance(value, Tensor):
                return value
            key = (id(value), entrance)
            if key not in seen:
                seen[key] = entrance(value)
            return seen[key]

        entrances = [*leading, *[others] * len(args)]
        new_args = tuple(map(enter, args, entrances))
        by_name = dict(zip(names, leading, strict=False))
        return new_args, {name: enter(value, by_name.get(name, others)) for name, value in kwargs.items()}

    module.register_forward_pre_hook(prepare, with_kwargs=True)


def hang_outputs(module: nn.Module, leave: Exit) -> None:
    """Lay out what a module returns: a tensor, or the tensors of a tuple, list or dict."""

    def finish(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return leave(output)
        return torch.utils._pytree.tree_map_only(Tensor, leave, output)

    module.register_forward_hook(finish)
