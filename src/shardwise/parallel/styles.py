"""The styles that shard or replicate a module's parameters.

>>> parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..nn.parameters import distribute_parameter, replicate_rest
from ..sharding.placement import Partial, Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from . import partition
from .axis import StyleAxis
from .base import ParallelStyle
from .hooks import InputConverter, OutputConverter, register_input_hook, register_output_hook
from .local_parameters import LocalParameters


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


class PackedColwiseParallel(_ShardingStyle):
    """Column-wise for several projections in one weight, such as `[gate; up]`: each of them is sharded."""

    _partition = staticmethod(lambda module: partition.packed(partition.colwise(module)))


class PackedRowwiseParallel(_ShardingStyle):
    """Row-wise for an input that consists of two blocks, each of which is sharded."""

    _partition = staticmethod(lambda module: partition.packed(partition.rowwise(module)))


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

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _replicate_parameters(self, module, device_mesh, Replicate(), self.use_local_output)


class ReplicatedOnShards(ParallelStyle):
    """Replicate the parameters of a module that gets other data on every rank, such as a norm of each rank's heads.

    The gradients of the parameters are summed over the ranks. Inputs and outputs are unchanged: local tensors, or
    DTensors with `use_local_output=False`.
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        for submodule in module.modules():
            replicate_rest(submodule, device_mesh, self.src_data_rank)
        if self.use_local_output:
            names = [name for name, _ in module.named_parameters()]
            LocalParameters(dict.fromkeys(names, lambda p: axis.to_local(p, grad=Partial()))).register(module)
        return module


class SharedKeyProjection(ParallelStyle):
    """Replicate a projection whose last `shared` output features every rank uses for its own heads.

    So it is with the rotary part of the keys in multi-head latent attention. The gradient of these features is summed
    over the ranks; that of the others, which go on to a column-wise projection, is summed there.
    """

    def __init__(self, shared: int) -> None:
        self.shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        ReplicateParallel(use_local_output=False)._apply(module, device_mesh)

        def finish(_: nn.Module, __: object, output: Tensor) -> Tensor:
            assert isinstance(output, DTensor)
            rest, shared = output.split([output.shape[-1] - self.shared, self.shared], -1)
            return torch.cat([axis.to_local(rest), axis.to_local(shared, grad=Partial())], -1)

        module.register_forward_hook(finish)
        return module


def _replicate_parameters(
    style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, layout: Placement, use_local_output: bool
) -> nn.Module:
    axis = StyleAxis(mesh, style.axis)
    for submodule in module.modules():
        replicate_rest(submodule, mesh, style.src_data_rank)
    register_input_hook(module, [InputConverter(axis, layout, layout)], None)
    register_output_hook(module, OutputConverter(axis, layout, layout, use_local_output))
    return module
