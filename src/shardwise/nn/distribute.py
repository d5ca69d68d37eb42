"""distribute_module: distribute the parameters of any module, and convert its inputs and outputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..sharding.mesh import current_mesh
from .parameters import Ties, keep_ties, replicate_rest

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
HookFn = Callable[[nn.Module, Any, DeviceMesh], object] | Callable[[Any, DeviceMesh], object]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: HookFn | None = None,
    output_fn: HookFn | None = None,
) -> nn.Module:
    """Distribute all parameters and buffers of a module over a mesh.

    `partition_fn(name, submodule, mesh)` is called for the module and each of its submodules, and may replace their
    parameters by distributed ones. Parameters and buffers that are still plain after that are replicated. Parameters
    that modules share stay shared: it is an error to give them different placements. `shard_parameters` is simpler if
    only placements are to be chosen.

    `input_fn(module, inputs, mesh)` and `output_fn(module, outputs, mesh)` run before and after each forward call, and
    may return other inputs or outputs. An optimizer that was made before continues with the new parameters.

    >>> distribute_module(model, mesh)                        # replicate the parameters that no plan has sharded
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    distribute_parameters(module, mesh, partition_fn)
    if input_fn is not None:
        register_input_fn(module, mesh, input_fn)
    if output_fn is not None:
        register_output_fn(module, mesh, output_fn)
    return module


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, partition_fn: PartitionFn | None, src_data_rank: int | None = 0
) -> None:
    """Call `partition_fn` for a module and each of its submodules, and replicate the tensors that it leaves plain."""
    with keep_ties(module):
        if partition_fn is not None:
            ties = Ties(module)
            for name, submodule in list(module.named_modules()):
                partition_fn(name, submodule, mesh)
            ties.restore()
        for submodule in module.modules():
            replicate_rest(submodule, mesh, src_data_rank)


def register_input_fn(module: nn.Module, mesh: DeviceMesh, input_fn: HookFn) -> None:
    """Call `input_fn(module, inputs, mesh)` before each forward call; it may return other inputs."""
    prepare = _hook("input_fn", input_fn)
    module.register_forward_pre_hook(lambda mod, inputs: prepare(mod, inputs, mesh))


def register_output_fn(module: nn.Module, mesh: DeviceMesh, output_fn: HookFn) -> None:
    """Call `output_fn(module, outputs, mesh)` after each forward call; it may return other outputs."""
    finish = _hook("output_fn", output_fn)
    module.register_forward_hook(lambda mod, _, outputs: finish(mod, outputs, mesh))


def _hook(name: str, function: Callable[..., object]) -> Callable[[nn.Module, object, DeviceMesh], object]:
    """Return `function` as one of three arguments. Like PyTorch, accept one of two, without the module."""
    count = len(inspect.signature(function).parameters)
    if count == 3:
        return function
    if count != 2:
        raise InputError(f"{name} takes {count} arguments", f"it is called as {name}(module, values, device_mesh)")
    warnings.warn(
        f"{name} of two arguments is deprecated: take three, {name}(module, values, device_mesh)",
        FutureWarning,
        stacklevel=4,
    )
    return lambda module, values, mesh: function(values, mesh)
