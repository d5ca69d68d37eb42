"""The functions that PyTorch's data-parallel wrappers call on distributed tensors, by PyTorch's names.

DistributedDataParallel and the first FSDP work on plain parameters. Before a module is wrapped, its distributed
parameters are replaced by their local shards; while it runs, they are distributed again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from .._torch.modules import parameters_of
from ..sharding.placement import Shard
from ..sharding.spec import DTensorSpec
from ..tensor.autograd import to_spec
from ..tensor.dtensor import DTensor


def _flatten_tensor(tensor: Tensor) -> tuple[Tensor, DTensorSpec | None]:
    """Return the local shard of a distributed tensor and its spec; for a plain tensor, the tensor and None."""
    if isinstance(tensor, DTensor):
        return tensor._local_shard, tensor._spec
    return tensor, None


def _unflatten_tensor(
    tensor: Tensor, spec: DTensorSpec, *, device_handle: object = None, compute_stream: object = None
) -> DTensor:
    """Return the distributed tensor with this local shard. Differentiable."""
    return DTensor.from_local(tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------


def _pre_dp_module_transform(module: nn.Module) -> None:
    """Replace distributed parameters by their local shards, and distribute them again in every forward pass."""
    _localize_dtensor(module)
    module.register_forward_pre_hook(_reconstruct_dtensor)
    module.register_forward_hook(_localize_dtensor)


def _localize_dtensor(module: nn.Module, *_: object, ignored_params: Collection[nn.Parameter] | None = None) -> None:
    """Replace the distributed parameters of a module and its submodules by their local shards."""
    for submodule in module.modules():
        for name, parameter in list(parameters_of(submodule).items()):
            if not isinstance(parameter, DTensor) or (ignored_params and parameter in ignored_params):
                continue
            leaf = getattr(parameter, "_local_leaf", None)
            if leaf is None:
                leaf = nn.Parameter(parameter._local_shard.detach(), parameter.requires_grad)
                leaf._dtensor_spec = parameter._spec
            parameters_of(submodule)[name] = leaf


def _reconstruct_dtensor(module: nn.Module, _input: object) -> None:
    """Replace local parameters by distributed tensors that are made from them, so that gradients flow to them."""
    for submodule in module.modules():
        for name, parameter in list(parameters_of(submodule).items()):
            spec = getattr(parameter, "_dtensor_spec", None)
            if spec is not None:
                tensor = _unflatten_tensor(cast(Tensor, parameter), spec)
                cast(Any, tensor)._local_leaf = parameter
                parameters_of(submodule)[name] = cast(nn.Parameter, tensor)


# ---- the first FSDP --------------------------------------------------------------------------------------------------


class DTensorExtensions:
    """Converts distributed parameters to local ones, which the first FSDP flattens, and back."""

    def __init__(self, device_handle: object) -> None:
        self.device_handle = device_handle
        self.compute_stream = None

    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, DTensorSpec | None]:
        """Return the tensor that FSDP flattens, and the argument of `post_unflatten_transform`."""
        return _flatten_tensor(tensor)

    def post_unflatten_transform(self, tensor: Tensor, param_extension: DTensorSpec) -> Tensor:
        """Return the distributed tensor with this local shard. Differentiable."""
        return _unflatten_tensor(tensor, param_extension)

    def chunk_tensor(self, *args: object) -> Tensor:
        """Raise an error: sharded state dicts of the first FSDP are not supported."""
        raise NotImplementedError(
            "FullyShardedDataParallel has no sharded state dict for parameters that are DTensors: wrap the module with "
            "torch.distributed.fsdp.fully_shard instead"
        )

    chunk_dtensor = pre_load_state_dict_transform = all_gather_dtensor = chunk_tensor


# ---- saved activations -----------------------------------------------------------------------------------------------


def input_reshard(module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """Save the replicated activations of a module for its backward pass as shards over a mesh."""
    if input_reshard_dim is None:
        return module
    hooks: list[saved_tensors_hooks] = []

    def pack(tensor: Tensor) -> tuple[Tensor, DTensorSpec | None]:
        if not isinstance(tensor, DTensor) or isinstance(tensor, nn.Parameter):
            return tensor, None
        if not tensor._spec.is_replicated() or tensor.dim() <= input_reshard_dim:
            return tensor, None
        with torch.no_grad():
            sharded = tensor.redistribute(placements=[Shard(input_reshard_dim)] * tensor.device_mesh.ndim)
        return sharded, tensor._spec

    def unpack(packed: tuple[Tensor, DTensorSpec | None]) -> Tensor:
        tensor, spec = packed
        with torch.no_grad():
            return tensor if spec is None else to_spec(cast(DTensor, tensor), spec)

    def begin(_: nn.Module, __: object) -> None:
        context = saved_tensors_hooks(pack, unpack)
        context.__enter__()
        hooks.append(context)

    def end(_: nn.Module, __: object, ___: object) -> None:
        hooks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)
    return module
