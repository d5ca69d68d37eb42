"""The styles that shard or replicate a module's parameters.

>>> parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..nn.parameters import distribute_parameter, replicate_rest
from ..sharding.placement import Placement, Replicate, Shard
from . import partition
from .axis import StyleAxis
from .base import ParallelStyle
from .hooks import InputConverter, OutputConverter, register_input_hook, register_output_hook


class _ShardingStyle(ParallelStyle):
    """The common part of the styles that shard a module's weight. A layout of None is the partition's own."""

    _partition: Callable[[nn.Module], partition.Partition]

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
        found = type(self)._partition(module)
        for name, placement in found.parameters.items():
            path, _, own = name.rpartition(".")
            placements = axis.parameter_placements(placement)
            distribute_parameter(module.get_submodule(path), own, device_mesh, placements, self.src_data_rank)
        for submodule in module.modules():
            replicate_rest(submodule, device_mesh, self.src_data_rank)
        layout = self.input_layouts or found.input
        dim_size = found.input_size if layout == found.input else None
        converter = InputConverter(axis, layout, found.input, dim_size=dim_size)
        register_input_hook(module, [converter] * found.inputs, InputConverter(axis, Replicate(), Replicate()))
        desired = self.output_layouts or found.output
        register_output_hook(module, OutputConverter(axis, None, desired, self.use_local_output))
        return module


class ColwiseParallel(_ShardingStyle):
    """Shard a module column-wise: each rank computes a shard of the output features.

    A plain input is taken to have `input_layouts` (default: replicated), and is replicated before use. The output has
    `output_layouts` (default: sharded in the last dim, for a convolution in the channels). It is a local tensor, or a
    DTensor with `use_local_output=False`.

    nn.MultiheadAttention is sharded by heads and its output projection row-wise; its output is replicated by default.
    """

    _partition = staticmethod(partition.colwise)


class RowwiseParallel(_ShardingStyle):
    """Shard a module row-wise: each rank reads a shard of the input features, and the results are summed.

    A plain input is taken to have `input_layouts` (default: sharded in the last dim; replicated for an embedding), and
    is redistributed to that default before use. The output has `output_layouts` (default: replicated); `Shard(1)` sums
    with a reduce-scatter. It is a local tensor, or a DTensor with `use_local_output=False`.
    """

    _partition = staticmethod(partition.rowwise)


class SequenceParallel(ParallelStyle):
    """Replicate a module's parameters and run it on inputs that are sharded in the sequence dim.

    For norms, dropout and other modules that treat the elements of a sequence one by one. A plain input is taken to be
    sharded in that dim, and so is the output: a DTensor, or a local tensor with `use_local_output=True`.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _replicate_parameters(self, module, device_mesh, Shard(self.sequence_dim), self.use_local_output)


class ReplicateParallel(ParallelStyle):
    """Replicate a module's parameters, inputs and outputs: every rank computes the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _replicate_parameters(self, module, device_mesh, Replicate(), use_local_output=True)


def _replicate_parameters(
    style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, layout: Placement, use_local_output: bool
) -> nn.Module:
    axis = StyleAxis(mesh, style.axis)
    for submodule in module.modules():
        replicate_rest(submodule, mesh, style.src_data_rank)
    register_input_hook(module, [InputConverter(axis, layout, layout)], None)
    register_output_hook(module, OutputConverter(axis, layout, layout, use_local_output))
    return module
