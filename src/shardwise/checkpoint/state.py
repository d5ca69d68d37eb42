"""States: nested dicts and lists of tensors and other values, modules and optimizers, as one dict by name.

Names are those of `torch.distributed.checkpoint`, the keys joined by dots: `{"a": {"b": x}}` has the name `a.b`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from .._torch import pytree
from ..comm.redistribute import redistribute_local
from ..errors import CheckpointError
from ..sharding.base import DTensorBase
from ..sharding.placement import Replicate

State = MutableMapping[str, Any]
Path = tuple[str | int, ...]


class FlatState(NamedTuple):
    """The values of a state by name, and the keys that lead to each."""

    values: dict[str, object]
    paths: dict[str, Path]


def flatten(state: Mapping[str, object]) -> FlatState:
    """Return the values of nested containers by name. Lists are flattened only if they contain a tensor or a dict."""
    values: dict[str, object] = {}
    paths: dict[str, Path] = {}
    for path, value in _leaves((), state):
        name = ".".join(map(str, path))
        if name in values:
            raise CheckpointError(
                f"two values of the state have the name {name!r}, in which dots join keys", "rename one of their keys"
            )
        values[name], paths[name] = value, path
    return FlatState(values, paths)


def _leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and _is_opened(value):
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item)
    else:
        yield path, value


def _is_opened(values: list[object]) -> bool:
    return any(
        isinstance(value, (Tensor, Mapping)) or (isinstance(value, list) and _is_opened(value)) for value in values
    )


def put(container: Any, path: Path, value: object) -> None:
    """Set the value at a path of `flatten`. A key that is not a string is found by its `str`."""
    for key in path[:-1]:
        container = container[_key(container, key)]
    container[_key(container, path[-1])] = value


def _key(container: object, key: str | int) -> object:
    if isinstance(container, Mapping) and key not in container:
        return next((found for found in container if str(found) == key), key)
    return key


# ---- modules, optimizers and other objects with a state --------------------------------------------------------------


def state_dicts(state: State) -> dict[str, object]:
    """Return the state with every module, optimizer and other stateful object replaced by its state dict.

    If the module of an optimizer is in the state, too, the optimizer's state is by names of parameters, so that it can
    be loaded into an optimizer that groups or shards them differently, or that has not made a step yet.
    """
    return {key: _state_dict(value, state) for key, value in state.items()}


def _state_dict(value: object, state: State) -> object:
    if isinstance(value, nn.Module):
        return get_model_state_dict(value)
    if isinstance(value, torch.optim.Optimizer):
        return pytree.tree_map_only(DTensorBase, _reduced, _optimizer_state(value, module_of(value, state)))
    return value.state_dict() if _is_stateful(value) else value  # type: ignore[attr-defined]


def _is_stateful(value: object) -> bool:
    """Return whether a value is `Stateful`, without isinstance, which is slow for a state of many values."""
    if isinstance(value, Tensor) or type(value) in (dict, list, bool, int, float, str):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module | None) -> Mapping[str, object]:
    return optimizer.state_dict() if module is None else get_optimizer_state_dict(module, optimizer)


def _reduced(tensor: DTensorBase) -> Tensor:
    """Return a value with Partial reduced: an optimizer may hold a norm that is not summed yet."""
    spec = tensor._spec
    if not spec.layout.partial:
        return tensor
    target = spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements])
    return type(tensor).concrete.wrap(redistribute_local(tensor._local_shard, spec, target), target)


def give_back(state: State, loaded: Mapping[str, Any]) -> None:
    """Load the state dicts in `loaded` into the stateful objects of the state, and set its other values."""
    for key, value in state.items():
        if isinstance(value, nn.Module):
            if any(tensor.is_meta for tensor in (*value.parameters(), *value.buffers())):
                value.load_state_dict(loaded[key], assign=True)  # there is no memory to copy into
            else:
                set_model_state_dict(value, loaded[key])
        elif isinstance(value, torch.optim.Optimizer):
            module = module_of(value, state)
            if module is None:
                value.load_state_dict(loaded[key])
            else:
                set_optimizer_state_dict(module, value, loaded[key])
        elif _is_stateful(value):
            value.load_state_dict(loaded[key])
        elif value is not loaded[key]:
            state[key] = loaded[key]


def module_of(optimizer: torch.optim.Optimizer, state: State) -> nn.Module | None:
    """Return the module of the state that owns all parameters of an optimizer; None for an `LBFGS`.

    An `LBFGS` keeps one state for all parameters, which cannot be stored by their names.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return None
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = (value for value in state.values() if isinstance(value, nn.Module))
    return next((module for module in modules if wanted <= {id(p) for p in module.parameters()}), None)
