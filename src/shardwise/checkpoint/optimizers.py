"""Allocate the state of optimizers that have made no step, for a checkpoint to be loaded into.

Most optimizers make their state in the first step, so a step with zero gradients and a learning rate of zero allocates
it. This does not work for two: `SparseAdam` refuses dense gradients, and the state of an `LBFGS` depends on the number
of steps, so it is allocated from the names and sizes in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .state import Path, State, module_of
from .stored import Stored


def has_optimizers(state: State) -> bool:
    """Return whether there is an optimizer in the state."""
    return any(isinstance(value, torch.optim.Optimizer) for value in state.values())


def allocate_states(state: State, stored: Stored) -> None:
    """Allocate the state of each optimizer that has none, so that the checkpoint can be loaded into it."""
    for key, value in state.items():
        if not isinstance(value, torch.optim.Optimizer) or value.state or isinstance(value, torch.optim.LBFGS):
            continue
        if module_of(value, state) is None and not _has_state(key, stored):
            continue
        if isinstance(value, torch.optim.SparseAdam):
            _allocate_sparse_adam(value)
        else:
            _step_without_effect(value)


def _has_state(key: str, stored: Stored) -> bool:
    return any(name.startswith(f"{key}.state.") for name in stored.described)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _allocate_sparse_adam(optimizer: torch.optim.SparseAdam) -> None:
    for parameter in _parameters(optimizer):
        zeros = [torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2)]
        optimizer.state[parameter] = {"step": 0, "exp_avg": zeros[0].detach(), "exp_avg_sq": zeros[1].detach()}


def _step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for parameter, _ in gradients:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for parameter, gradient in gradients:
            parameter.grad = gradient


# ---- LBFGS -----------------------------------------------------------------------------------------------------------


def use_stored_histories(state: State, loaded: Mapping[str, Any], stored: Stored) -> None:
    """Give each `LBFGS` in `loaded` zeros for as many directions as the checkpoint has."""
    paths: Mapping[str, Path] = stored.metadata.planner_data or {}
    for key, value in state.items():
        if isinstance(value, torch.optim.LBFGS) and f"{key}.param_groups.0.lr" in paths:
            flat = _flattened(_parameters(value))
            found = {
                path[2:]: _zeros(stored.described[name], flat)
                for name, path in paths.items()
                if path[:2] == (key, "state") and name in stored.described
            }
            loaded[key]["state"] = {int(number): item for number, item in _nested(found).items()}


def _flattened(parameters: Iterable[Tensor]) -> Tensor:
    """Return all parameters as one vector, sharded as the directions of `LBFGS` are."""
    with torch.no_grad():
        real = (torch.view_as_real(p) if p.is_complex() else p for p in parameters)
        return torch.cat([parameter.detach().reshape(-1) for parameter in real])


def _zeros(known: object, flat: Tensor) -> Tensor | None:
    """Return zeros of the shape of a stored tensor; None for any other value."""
    if not isinstance(known, TensorStorageMetadata):
        return None
    if known.size == flat.shape:
        return torch.zeros_like(flat, dtype=known.properties.dtype)
    return flat.new_zeros(known.size, dtype=known.properties.dtype)


def _nested(values: Mapping[Path, object]) -> Any:
    """Return nested dicts and lists with these leaves: `{"a": [1, 2]}` for `{("a", 0): 1, ("a", 1): 2}`."""
    if () in values:
        return values[()]
    parts: dict[str | int, dict[Path, object]] = {}
    for path, value in values.items():
        parts.setdefault(path[0], {})[path[1:]] = value
    if parts and all(isinstance(key, int) for key in parts):
        return [_nested(parts[index]) for index in range(len(parts))]
    return {key: _nested(part) for key, part in parts.items()}
