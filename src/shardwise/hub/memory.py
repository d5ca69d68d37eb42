"""Allocate the parameters and buffers of a model on the meta device, and compute buffers that no file has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch.state_dicts import non_persistent_buffers
from ..dispatch.modes import implicit_replication
from ..errors import CheckpointError
from ..nn.parameters import Ties
from ..sharding.base import DTensorBase
from .state import device_of


def allocate(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Allocate the local shard of each tensor on the meta device; tied tensors stay tied.

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


# ---- buffers that no file has ----------------------------------------------------------------------------------------


def compute_lost_buffers(model: nn.Module) -> None:
    """Compute the buffers on the meta device that no file has, by `initialize_weights` of models of transformers.

    Raise an error for other models, and if a buffer has no value afterwards.
    """
    lost = _lost_buffers(model)
    if not lost:
        return
    owner: Any = model
    if hasattr(owner, "initialize_weights"):
        for module, name in lost.values():
            buffer = module.get_buffer(name)
            setattr(module, name, torch.empty_like(buffer, device="cpu").fill_(_unset(buffer.dtype)))
            module.__dict__.pop("_is_hf_initialized", None)
        for path, tensor in [*owner.named_parameters(), *owner.named_buffers()]:
            if path not in lost:
                tensor._is_hf_initialized = True
        with implicit_replication():
            owner.initialize_weights()
        lost = {path: at for path, at in lost.items() if _is_unset(at[0].get_buffer(at[1]))}
    if lost:
        raise CheckpointError(
            f"the buffers {', '.join(lost)} are on the meta device, and no file has them",
            "pass a function that makes the model, which gives its buffers values: hub.load(lambda: Model(...), ...)",
        )


def _lost_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the buffers on the meta device that no file has: by path, the module and the name in it."""
    found = {}
    for path, module in model.named_modules():
        for name in sorted(non_persistent_buffers(module)):
            if getattr(module, name, None) is not None and module.get_buffer(name).is_meta:
                found[f"{path}.{name}" if path else name] = (module, name)
    return found


def _unset(dtype: torch.dtype) -> float:
    """Return a value that marks a buffer as not computed."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min + 1


def _is_unset(buffer: torch.Tensor) -> bool:
    if buffer.dtype == torch.bool:
        return False  # both values are valid, so there is no mark
    unset = (
        buffer.isnan() if buffer.dtype.is_floating_point or buffer.dtype.is_complex else buffer == _unset(buffer.dtype)
    )
    return bool(unset.any())
