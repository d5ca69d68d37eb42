"""Giving memory to the parameters and buffers of a model that was built without, and values to buffers no file has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch.state_dicts import non_persistent_buffers
from ..errors import CheckpointError
from ..nn.parameters import Ties
from ..sharding.base import DTensorBase
from .state import device_of


def allocate(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Give each tensor on the meta device memory for its local shard; modules that share one share the new one.

    Buffers that have values are moved to the device of the mesh.
    """
    device = device_of(mesh.device_type if mesh is not None else "cpu")
    ties = Ties(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta:
            new = torch.empty_like(tensor, device=_device(tensor, device))
        elif not isinstance(tensor, DTensorBase) and tensor.device.type != device.type:
            new = tensor.detach().to(device)
        else:
            continue
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
        for owner in ties.owners(tensor):
            setattr(owner.module, owner.name, new)


def _device(tensor: Tensor, device: torch.device) -> torch.device:
    return device_of(tensor._spec.mesh_info.device_type) if isinstance(tensor, DTensorBase) else device


def lost_buffers(model: nn.Module) -> list[str]:
    """The buffers on the meta device that no file has, by name."""
    found = []
    for path, module in model.named_modules():
        for name in non_persistent_buffers(module):
            buffer = module.get_buffer(name) if getattr(module, name, None) is not None else None
            if buffer is not None and buffer.is_meta:
                found.append(f"{path}.{name}" if path else name)
    return found


def compute_again(model: nn.Module, lost: list[str]) -> None:
    """Compute buffers that were made on the meta device: models of transformers do it as they initialise themselves."""
    if not lost:
        return
    owner: Any = model
    if not hasattr(owner, "initialize_weights"):
        raise CheckpointError(
            f"the buffers {', '.join(lost)} are on the meta device, and no file has them",
            "pass the function that makes the model, hub.load(lambda: Model(...), ...): its buffers then have values",
        )
    for name, tensor in [*owner.named_parameters(), *owner.named_buffers()]:
        if name not in lost:
            tensor._is_hf_initialized = True
    owner.initialize_weights()
