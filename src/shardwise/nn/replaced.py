"""Plain parameters that were replaced by distributed ones, and optimizers that still hold them.

A plain parameter refers to the distributed one that replaced it in a module. So another module that shares the plain
one gets the same replacement later, and an optimizer that was made before continues with the replacement.

>>> optimizer = torch.optim.AdamW(model.parameters())
>>> distribute_module(model, mesh)
>>> loss_of(model).backward()
>>> optimizer.step()                        # updates the distributed parameters
"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import InputError
from ..sharding.mesh import MeshInfo
from ..tensor.autograd import to_spec
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor

_REPLACEMENT = "_distributed_as"
"""The attribute of a plain tensor that holds its replacement."""


def record_replacement(old: Tensor, new: DTensor) -> None:
    """Record that `new` replaced `old` in a module."""
    setattr(old, _REPLACEMENT, new)
    _follow_replacements()


def copy_attributes(old: Tensor, new: DTensor) -> None:
    """Copy the attributes that a program has set on a plain parameter to its distributed one."""
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name != _REPLACEMENT})


def replacement_of(tensor: Tensor, mesh_info: MeshInfo | None = None) -> DTensor | None:
    """Return the replacement of a plain tensor, or None; with a mesh, only one on that mesh."""
    new: DTensor | None = getattr(tensor, _REPLACEMENT, None)
    return new if new is None or mesh_info is None or new._spec.mesh_info is mesh_info else None


# ---- optimizers -----------------------------------------------------------------------------------------------------


@functools.cache
def _follow_replacements() -> None:
    """Make optimizers look for replaced parameters before each step."""
    register_optimizer_step_pre_hook(_use_replacements)


def _use_replacements(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Replace the plain parameters of an optimizer by their distributed replacements.

    Plain parameters that have gradients themselves are still in use, and stay.
    """
    pairs = [
        (group["params"], index, new)
        for group in optimizer.param_groups
        for index, parameter in enumerate(group["params"])
        if (new := parameter.__dict__.get(_REPLACEMENT)) is not None
    ]
    if not any(new.grad is not None for _, _, new in pairs):
        return
    for parameters, index, new in pairs:
        old = parameters[index]
        if old.grad is None:
            parameters[index] = new
            if old in optimizer.state:
                optimizer.state[new] = _distributed(optimizer.state.pop(old), old, new)
        elif new.grad is not None:
            raise InputError(
                f"the optimizer holds a plain parameter of shape {list(old.shape)} and a module its distributed "
                f"replacement {new._spec!r}, and both have a gradient",
                "make the optimizer after distribute_module or parallelize_module",
            )


def _distributed(state: dict[str, object], old: Tensor, new: DTensor) -> dict[str, object]:
    """Return the optimizer state of a plain parameter, distributed like its replacement; the step count stays plain."""

    def distribute(name: str, value: object) -> object:
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or name == "step":
            return value
        replicated = distribute_tensor(value, new.device_mesh, None, src_data_rank=None)
        return to_spec(replicated, new._spec.with_dtype(value.dtype)) if value.shape == old.shape else replicated

    return {name: distribute(name, value) for name, value in state.items()}
