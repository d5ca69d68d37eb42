"""PyTorch's functions that gather and distribute state dicts. They test for PyTorch's own class of DTensors."""

from __future__ import annotations

from torch import nn

from .python_functions import Place


def gathering_functions() -> list[Place]:
    """Return the places of `_gather_state_dict(state_dict, **options)`.

    It returns a dict of the same keys with full tensors, or an empty one on ranks that are not in `ranks_only`.
    """
    from torch.distributed import _state_dict_utils
    from torch.distributed.checkpoint import state_dict

    return [Place(_state_dict_utils, "_gather_state_dict"), Place(state_dict, "_gather_state_dict")]


def distributing_functions() -> list[Place]:
    """Return the places of functions `(full, local, ...)` that store the values of `full`, by key, in `local`.

    They replace a value of `local` that is PyTorch's DTensor by one that is sharded like it, others by a full tensor.
    `_distribute_state_dict` stores all keys, from full tensors that every rank has, and `_broadcast_tensors` the keys
    that it is given, from tensors of the first rank.
    """
    from torch.distributed import _state_dict_utils
    from torch.distributed.checkpoint import state_dict

    return [
        Place(_state_dict_utils, "_broadcast_tensors"),
        Place(_state_dict_utils, "_distribute_state_dict"),
        Place(state_dict, "_distribute_state_dict"),
    ]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are not in its state dict."""
    return set(module._non_persistent_buffers_set)
