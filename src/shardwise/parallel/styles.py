"""The styles that shard or replicate a module's parameters.

>>> parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..nn.distribute import PartitionFn, distribute_parameters, register_input_fn, register_output_fn
from ..nn.parameters import distribute_parameter, replicate_rest
from ..sharding.placement import InterleavedShard, Partial, Placement, Replicate, Shard, as_placement
from ..tensor.dtensor import DTensor
from . import partition
from .axis import StyleAxis
from .base import ParallelStyle
from .converters import InputConverter, OutputConverter, input_converter, output_converter
from .hooks import convert_outputs, register_input_hook, register_output_hook
from .local_parameters import LocalParameters, owner_of


class Default(tuple[Placement, ...]):
    """Layouts that were not given: those of an nn.Linear, until the style is applied to a module with other ones."""

    __slots__ = ()


Layouts = tuple[Placement, ...]


def _layouts(given: Placement | None, default: Placement) -> Layouts:
    return Default((default,)) if given is None else (as_placement(given) or given,)


def _of_module(layouts: Layouts, own: Placement) -> Layouts:
    """Return `own`, the module's placement, as layouts, unless the style was given layouts."""
    return Default((own,)) if isinstance(layouts, Default) else layouts


class _ShardingStyle(ParallelStyle):
    """The base class of styles that shard a module's weight.

    `_linear` are the layouts of inputs and outputs for an nn.Linear, the defaults of the arguments.
    """

    _partition: Callable[[nn.Module], partition.Partition]
    _linear: tuple[Placement, Placement]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = _layouts(input_layouts, self._linear[0])
        self.output_layouts = _layouts(output_layouts, self._linear[1])
        self.desired_input_layouts = _layouts(None, self._linear[0])
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found = type(self)._partition(module)
        layouts = _of_module(self.input_layouts, found.input)
        desired = self.desired_input_layouts = _of_module(self.desired_input_layouts, found.input)
        outputs = _of_module(self.output_layouts, found.output)
        distribute_parameters(module, device_mesh, self._partition_fn(module), self.src_data_rank)
        axis = StyleAxis(device_mesh, self.axis)
        if self._calls(_ShardingStyle, "_prepare_input_fn", device_mesh):
            register_input_fn(module, device_mesh, partial(self._prepare_input_fn, layouts, desired))
        else:
            dim_size = found.input_size if layouts == (found.input,) else None
            converter = InputConverter(axis, layouts[0], desired[0], dim_size=dim_size)
            register_input_hook(module, [converter] * found.inputs, InputConverter(axis, Replicate(), Replicate()))
        if self._calls(_ShardingStyle, "_prepare_output_fn", device_mesh):
            register_output_fn(module, device_mesh, partial(self._prepare_output_fn, outputs, self.use_local_output))
        else:
            register_output_hook(module, OutputConverter(axis, None, outputs[0], self.use_local_output))
        return module

    def _partition_fn(self, module: nn.Module) -> PartitionFn:
        """Return the method that shards the parameters of a module and its submodules."""
        if partition.is_linear(module):
            return self._partition_linear_fn
        if isinstance(module, nn.Embedding):
            return self._partition_embedding_fn
        return lambda name, submodule, mesh: None if name else self._shard(submodule, mesh)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if partition.is_linear(module):
            self._shard(module, device_mesh)

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Embedding):
            self._shard(module, device_mesh)

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        axis = StyleAxis(mesh, self.axis)
        for path, placement in type(self)._partition(module).parameters.items():
            owner, name = owner_of(module, path)
            distribute_parameter(owner, name, mesh, axis.parameter_placements(placement), self.src_data_rank)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        mod: nn.Module,
        inputs: tuple[object, ...],
        device_mesh: DeviceMesh,
    ) -> object:
        """Return the module's first argument, converted."""
        layout, desired = input_layouts[0], desired_input_layouts[0]
        features = mod.in_features if layout == Shard(-1) and partition.is_linear(mod) else None
        return input_converter(device_mesh, layout, desired, dim_size=features)(inputs[0])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Layouts, use_local_output: bool, mod: nn.Module, outputs: object, device_mesh: DeviceMesh
    ) -> object:
        """Return what the caller gets for the output of the module."""
        return convert_outputs(output_converter(device_mesh, None, output_layouts[0], use_local_output), outputs)


class ColwiseParallel(_ShardingStyle):
    """Shard a module column-wise: each rank computes a shard of the output features.

    A plain input has the layout `input_layouts` (default: replicated), and is replicated before use. The output has
    `output_layouts` (default: sharded in the last dim, for a convolution in the channels). It is a local tensor, or a
    DTensor with `use_local_output=False`.

    nn.MultiheadAttention is sharded by heads and its output projection row-wise; its output is replicated by default.

    >>> model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    >>> model[0].weight.placements, model[0](torch.ones(2, 4)).shape     # a local output, with 4 of the 8 features
    ((Shard(dim=0),), torch.Size([2, 4]))
    """

    _partition = staticmethod(partition.colwise)
    _linear = (Replicate(), Shard(-1))


class RowwiseParallel(_ShardingStyle):
    """Shard a module row-wise: each rank reads a shard of the input features, and the results are summed.

    A plain input has the layout `input_layouts` (default: sharded in the last dim; replicated for an embedding), and is
    redistributed to that default before use. The output has `output_layouts` (default: replicated); `Shard(1)` sums
    with a reduce-scatter. It is a local tensor, or a DTensor with `use_local_output=False`.

    >>> model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    >>> model[2].weight.placements, model(torch.ones(2, 4)).shape        # the sum over the ranks
    ((Shard(dim=1),), torch.Size([2, 4]))
    """

    _partition = staticmethod(partition.rowwise)
    _linear = (Shard(-1), Replicate())


class PackedColwiseParallel(_ShardingStyle):
    """Column-wise for several projections in one weight, such as `[gate; up]`: each of them is sharded."""

    _partition = staticmethod(lambda module: partition.packed(partition.colwise(module)))
    _linear = (Replicate(), InterleavedShard(-1, 2))


class PackedRowwiseParallel(_ShardingStyle):
    """Row-wise for an input of two blocks: each of them is sharded."""

    _partition = staticmethod(lambda module: partition.packed(partition.rowwise(module)))
    _linear = (InterleavedShard(-1, 2), Replicate())


class SequenceParallel(ParallelStyle):
    """Replicate a module's parameters and run it on inputs that are sharded in the sequence dim.

    For norms, dropout and other modules that treat the elements of a sequence one by one. A plain input is a shard in
    that dim, and so is the output: a DTensor, or a local tensor with `use_local_output=True`.

    >>> model = parallelize_module(model, mesh["tp"], {"1": SequenceParallel(sequence_dim=0)})
    >>> model[1](torch.ones(2, 4)).spec                     # each rank passes 2 tokens of a sequence of 4
    f32[4@tp, 4]
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding: Layouts = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis, layout = StyleAxis(device_mesh, self.axis), self.sequence_sharding[0]
        distribute_parameters(module, device_mesh, self._replicate_module_fn, self.src_data_rank)
        if self._calls(SequenceParallel, "_prepare_input_fn", device_mesh):
            register_input_fn(module, device_mesh, partial(self._prepare_input_fn, self.sequence_sharding))
        else:
            register_input_hook(module, [InputConverter(axis, layout, layout)], None)
        if self._calls(SequenceParallel, "_prepare_output_fn", device_mesh):
            register_output_fn(module, device_mesh, partial(self._prepare_output_fn, self.use_local_output))
        else:
            register_output_hook(module, OutputConverter(axis, layout, layout, self.use_local_output))
        return module

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        replicate_rest(module, device_mesh, self.src_data_rank)

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: Layouts, mod: nn.Module, inputs: tuple[object, ...], device_mesh: DeviceMesh
    ) -> object:
        """Return the module's first argument, converted."""
        return input_converter(device_mesh, sequence_sharding[0], sequence_sharding[0])(inputs[0])

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: object, device_mesh: DeviceMesh) -> object:
        """Return what the caller gets for the output of the module, which keeps its placements."""
        return convert_outputs(output_converter(device_mesh, None, None, use_local_output), outputs)


class ReplicateParallel(ParallelStyle):
    """Replicate a module's parameters, inputs and outputs: every rank computes the same."""

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        distribute_parameters(module, device_mesh, None, self.src_data_rank)
        register_input_hook(module, [InputConverter(axis, Replicate(), Replicate())], None)
        register_output_hook(module, OutputConverter(axis, Replicate(), Replicate(), self.use_local_output))
        return module


class ReplicatedOnShards(ParallelStyle):
    """Replicate the parameters of a module whose inputs differ between ranks, such as a norm of each rank's heads.

    The gradients of the parameters are summed over the ranks. Inputs and outputs are unchanged: local tensors, or
    DTensors with `use_local_output=False`.
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        distribute_parameters(module, device_mesh, None, self.src_data_rank)
        if self.use_local_output:
            names = [name for name, _ in module.named_parameters()]
            LocalParameters(dict.fromkeys(names, lambda p: axis.to_local(p, grad=Partial()))).register(module)
        return module


class SharedKeyProjection(ParallelStyle):
    """Replicate a projection whose last `shared` output features every rank uses for its own heads.

    An example is the rotary part of the keys in multi-head latent attention. The gradient of these features is summed
    over the ranks. The other features go to a column-wise projection, which sums their gradient.
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
