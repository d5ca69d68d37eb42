"""The state of a model: parameters and persistent buffers under the keys of the state dict.

A tensor that modules share has several keys. The stacked parameters of an `ExpertList` have a key for each expert, like
the list of modules that it was made from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._torch.state_dicts import non_persistent_buffers
from ..fsdp import FSDPModule
from ..nn.parameters import own_tensors
from ..parallel.expert_list import STACKED, ExpertList
from .mosaic import Mosaic, select


class State(NamedTuple):
    """The tensors by their first name, and for each key of the state dict a mosaic: a tensor or a part of it."""

    tensors: dict[str, Tensor]
    entries: dict[str, Mosaic]

    def names(self) -> dict[str, list[str]]:
        """Return for each tensor its keys, or those of its parts."""
        found: dict[str, list[str]] = {name: [] for name in self.tensors}
        for key, entry in self.entries.items():
            found[source_of(entry)].append(key)
        return found


def source_of(entry: Mosaic) -> str:
    """Return the name of the tensor that an entry is a part of."""
    return entry.pieces[0].source


def state_of(model: nn.Module) -> State:
    """Return the state of a model. Parameters that `fully_shard` has gathered are freed first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    first: dict[int, str] = {}
    state = State({}, {})
    stacked: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ExpertList):
            stacked[f"{path}.{STACKED}" if path else STACKED] = len(module)
        temporary = non_persistent_buffers(module)
        for name, tensor in own_tensors(module).items():
            if name in temporary:
                continue
            key = f"{path}.{name}" if path else name
            source = first.setdefault(id(tensor), key)
            state.tensors.setdefault(source, tensor)
            entry = Mosaic.of(source, tuple(map(int, tensor.shape)), tensor.dtype)
            above = next((above for above in stacked if key.startswith(f"{above}.")), None)
            if above is None:
                state.entries[key] = entry
                continue
            experts, inner = above.removesuffix(STACKED), key.removeprefix(f"{above}.")
            for index in range(stacked[above]):
                state.entries[f"{experts}{index}.{inner}"] = select(entry, 0, index)
    return state


def parameter_count(state: State) -> int:
    """Return the number of elements of all parameters."""
    return sum(tensor.shape.numel() for tensor in state.tensors.values() if isinstance(tensor, nn.Parameter))


def device_of(device_type: str) -> torch.device:
    """Return the current device of this type."""
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
