"""The random number generator that an op draws from."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["generator_for"]


def generator_for(arguments: Iterable[object], device: torch.device) -> torch.Generator:
    """Return the generator among the arguments of a random op, or else the default generator of the device."""
    for argument in arguments:
        if isinstance(argument, torch.Generator):
            return argument
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]
