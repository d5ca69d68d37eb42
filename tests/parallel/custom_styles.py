"""Styles that override methods of PyTorch's styles, in the manners that training libraries do.

`define(parallel, tensor)` makes them from the styles of shardwise or of PyTorch, by a change of imports alone.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd


class LoraLinear(nn.Linear):
    """A linear with two low-rank matrices as submodules."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__(inputs, outputs)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x))


class Router(nn.Module):
    """A module that the styles of PyTorch do not know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ self.weight, -1) * self.scale


class Experts(nn.Module):
    """Tokens `[expert, token, feature]`, as many for each expert. It runs on local weights."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(number, width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        return torch.tanh(tokens @ weight)


class Rotary(nn.Module):
    """Takes two tensors, of which one is sharded in the sequence."""

    def forward(self, x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        return x * factors.cos(), x * factors.sin()


class Masked(nn.Module):
    """Takes a mask that may be None, by position or by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.linear(x)
        return out if mask is None else out * mask


def define(p: Any, t: Any) -> SimpleNamespace:
    """Return the styles, made from those of a module `p` and the tensors of a module `t`."""

    class WideGatherColwise(p.ColwiseParallel):
        """Communicates inputs in another dtype, as styles for 8-bit linears do."""

        @staticmethod
        def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
            x = inputs[0]
            if not isinstance(x, t.DTensor):
                x = t.DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
            x = x.double()
            if input_layouts != desired_input_layouts:
                x = x.redistribute(placements=desired_input_layouts, async_op=True)
            return x.float()

        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
            if outputs.placements != output_layouts:
                outputs = outputs.redistribute(placements=output_layouts, async_op=True)
            return outputs.to_local() if use_local_output else outputs

        def _apply(self, module, device_mesh):
            assert isinstance(module, nn.Linear)
            return super()._apply(module, device_mesh)

    class FlippedRowwise(p.RowwiseParallel):
        """Calls the methods that it overrides."""

        def _prepare_input_fn(self, input_layouts, desired_input_layouts, mod, inputs, device_mesh):
            x = super()._prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
            return x.flip(0)

        def _prepare_output_fn(self, output_layouts, use_local_output, mod, outputs, device_mesh):
            return super()._prepare_output_fn(output_layouts, use_local_output, mod, outputs.flip(0), device_mesh)

    def distribute(module, name, device_mesh, placements, src_data_rank):
        parameter = getattr(module, name)
        made = t.distribute_tensor(parameter, device_mesh, placements, src_data_rank=src_data_rank)
        module.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))

    class ColwiseLora(p.ColwiseParallel):
        def _partition_linear_fn(self, name, module, device_mesh):
            for path, _ in list(module.named_parameters()):
                below, _, own = path.rpartition(".")
                distribute(module.get_submodule(below), own, device_mesh, [t.Shard(0)], self.src_data_rank)

        def _partition_embedding_fn(self, name, module, device_mesh):
            distribute(module, "weight", device_mesh, [t.Shard(1)], self.src_data_rank)

    class RowwiseLora(p.RowwiseParallel):
        def _partition_linear_fn(self, name, module, device_mesh):
            super()._partition_linear_fn(name, module, device_mesh)
            if hasattr(module, "lora_A"):
                distribute(module.lora_A, "weight", device_mesh, [t.Shard(1)], self.src_data_rank)
                distribute(module.lora_B, "weight", device_mesh, [t.Shard(1)], self.src_data_rank)

        def _partition_embedding_fn(self, name, module, device_mesh):
            for own, _ in list(module.named_parameters()):
                distribute(module, own, device_mesh, [t.Shard(0)], self.src_data_rank)

    class FusedColwise(p.ColwiseParallel):
        """Shards each of several projections in one weight, and calls the result one shard of the weight."""

        def __init__(self, *, sections, **options):
            super().__init__(**options)
            self.sections = sections

        def _partition_linear_fn(self, name, module, device_mesh):
            ranks = device_mesh.size()
            for own, parameter in list(module.named_parameters()):
                parts = parameter.detach().split(self.sections)
                shards = [t.distribute_tensor(part, device_mesh, [t.Shard(0)]).to_local() for part in parts]
                local = torch.cat(shards)
                made = t.DTensor.from_local(local, device_mesh, [t.Shard(0)], run_check=False)
                assert local.shape[0] * ranks == sum(self.sections)
                module.register_parameter(own, nn.Parameter(made, requires_grad=parameter.requires_grad))

    class WaitingRowwise(p.RowwiseParallel):
        """Finds the method that it overrides without an instance."""

        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
            method = super(WaitingRowwise, WaitingRowwise)._prepare_output_fn
            out = method(output_layouts, use_local_output, mod, outputs, device_mesh)
            return out if isinstance(out, t.DTensor) else out.clone()

    class SequenceLora(p.SequenceParallel):
        def _replicate_module_fn(self, name, module, device_mesh):
            for own, parameter in list(module.named_parameters()):
                made = t.DTensor.from_local(parameter, device_mesh, [t.Replicate()], run_check=False)
                module.register_parameter(own, nn.Parameter(made, requires_grad=parameter.requires_grad))

    class SequenceGather(p.SequenceParallel):
        @staticmethod
        def _prepare_output_fn(use_local_output, mod, outputs, device_mesh):
            if any(isinstance(placement, t.Shard) for placement in outputs.placements):
                outputs = outputs.redistribute(device_mesh=device_mesh, placements=[t.Replicate()])
            return p.SequenceParallel._prepare_output_fn(use_local_output, mod, outputs, device_mesh)

    class SequenceRotary(p.SequenceParallel):
        @staticmethod
        def _prepare_input_fn(sequence_sharding, mod, inputs, device_mesh):
            placements = (sequence_sharding, (t.Replicate(),))
            return tuple(
                value if isinstance(value, t.DTensor) else t.DTensor.from_local(value, device_mesh, of, run_check=False)
                for value, of in zip(inputs, placements, strict=True)
            )

        @staticmethod
        def _prepare_output_fn(use_local_output, mod, outputs, device_mesh):
            return tuple(output.to_local() if use_local_output else output for output in outputs)

    class OptionalInput(p.PrepareModuleInput):
        def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
            if input is None:
                return None
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    class OptionalInputOutput(p.PrepareModuleInputOutput):
        def __init__(self, **options):
            super().__init__(**options)
            given = self.prepare_module_input
            self.prepare_module_input = OptionalInput(
                input_layouts=given.input_layouts,
                desired_input_layouts=given.desired_input_layouts,
                input_kwarg_layouts=given.input_kwarg_layouts,
                desired_input_kwarg_layouts=given.desired_input_kwarg_layouts,
                use_local_output=given.use_local_output,
            )

    class PaddedInput(p.PrepareModuleInput):
        """Drops arguments that the module does not take."""

        def _prepare_input_fn(self, inputs, device_mesh):
            return super()._prepare_input_fn(inputs[: len(self.input_layouts)], device_mesh)

    class FirstOutput(p.PrepareModuleOutput):
        def _prepare_out_fn(self, outputs, device_mesh):
            return super()._prepare_out_fn(outputs[0], device_mesh)

    class NoParallel(p.ParallelStyle):
        """Replicates a module that PyTorch's styles do not know, with hooks that it hands to distribute_module."""

        def __init__(self, *, input_layout=None, output_layout=None, use_local_output=True):
            self.input_layout = input_layout or t.Replicate()
            self.output_layout = output_layout or t.Replicate()
            self.desired_input_layout = t.Replicate()
            self.use_local_output = use_local_output

        @staticmethod
        def _prepare_input_fn(input_layout, desired_input_layout, mod, inputs, device_mesh):
            x = inputs[0]
            if not isinstance(x, t.DTensor):
                x = t.DTensor.from_local(x, device_mesh, (input_layout,), run_check=False)
            if input_layout != desired_input_layout:
                x = x.redistribute(placements=(desired_input_layout,), async_op=True)
            return (x, *inputs[1:])

        @staticmethod
        def _prepare_output_fn(output_layout, use_local_output, mod, outputs, device_mesh):
            if outputs.placements != (output_layout,):
                outputs = outputs.redistribute(placements=(output_layout,), async_op=True)
            return outputs.to_local() if use_local_output else outputs

        def _apply(self, module, device_mesh):
            return t.distribute_module(
                module,
                device_mesh,
                None,
                partial(self._prepare_input_fn, self.input_layout, self.desired_input_layout),
                partial(self._prepare_output_fn, self.output_layout, self.use_local_output),
            )

    class RouterColwise(p.ColwiseParallel):
        """Applies the parts of a style to a module of its own."""

        def _partition_router_fn(self, name, module, device_mesh):
            distribute(module, "weight", device_mesh, [t.Shard(1)], self.src_data_rank)
            distribute(module, "scale", device_mesh, [t.Shard(0)], self.src_data_rank)

        def _apply(self, module, device_mesh):
            return t.distribute_module(
                module,
                device_mesh,
                self._partition_router_fn if isinstance(module, Router) else self._partition_linear_fn,
                partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
                partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
            )

    class LinearRowwise(p.RowwiseParallel):
        def _apply(self, module, device_mesh):
            self.desired_input_layouts = (t.Shard(-1),)
            return t.distribute_module(
                module,
                device_mesh,
                self._partition_linear_fn,
                partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
                partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
            )

    class ExpertParallel(p.ParallelStyle):
        """Shards the experts, and sends each token to the rank of its expert and back."""

        def _partition_fn(self, name, module, device_mesh):
            distribute(module, "weight", device_mesh, [t.Shard(0)], self.src_data_rank)

        def _token_dispatch(self, module, inputs, device_mesh):
            sent = all_to_all_single_autograd(inputs[0].contiguous(), None, None, device_mesh.get_group())
            ranks = device_mesh.size()
            return sent.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

        def _token_combine(self, module, outputs, device_mesh):
            ranks = device_mesh.size()
            sent = outputs.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
            return all_to_all_single_autograd(sent.contiguous(), None, None, device_mesh.get_group())

        def _apply(self, module, device_mesh):
            return t.distribute_module(
                module, device_mesh, self._partition_fn, self._token_dispatch, self._token_combine
            )

    return SimpleNamespace(**{name: value for name, value in locals().items() if isinstance(value, type)})
