"""The random number generator that an op draws from, and its state on ranks that were seeded differently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["generator_for", "seed_ranks", "states_of_ranks"]

_states: dict[int, list[torch.Tensor]] = {}
"""The state of each rank, by the id of the generator, for generators whose ranks were seeded differently."""


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


def seed_ranks(generator: torch.Generator, seeds: Sequence[int] | None) -> None:
    """Give each rank a seed of its own. With None all share the state of the generator again, as by default."""
    _states.pop(id(generator), None)
    if seeds is not None:
        _states[id(generator)] = [torch.Generator(generator.device).manual_seed(seed).get_state() for seed in seeds]


def states_of_ranks(generator: torch.Generator, ranks: int) -> list[torch.Tensor] | None:
    """Return the list of the states of ranks that were seeded differently, to be updated; None if they were not."""
    states = _states.get(id(generator)) if _states else None
    return states if states is not None and len(states) == ranks else None
