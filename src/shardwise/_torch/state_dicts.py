"""PyTorch's functions that gather and distribute state dicts. They know distributed tensors by their class."""

from __future__ import annotations

from torch import nn

from .python_functions import Place


def gathering_functions() -> list[Place]:
    """Where `_gather_state_dict(state_dict, **options)` is looked up.

    It returns a dict of the same keys with full tensors, or an empty one on ranks that `ranks_only` leaves out.
    """
    from torch.distributed import _state_dict_utils
    from torch.distributed.checkpoint import state_dict

    return [Place(_state_dict_utils, "_gather_state_dict"), Place(state_dict, "_gather_state_dict")]


def distributing_functions() -> list[Place]:
    """Where functions `(full, local, ...)` are looked up that put the values of `full`, by key, into `local`.

    A value of `local` that is PyTorch's DTensor is replaced by one that is sharded like it, others by a full tensor.
    `_distribute_state_dict` takes all keys at once, from full tensors that every rank has. `_broadcast_tensors` takes
    the keys that it is given, from the first rank.
    """
    from torch.distributed import _state_dict_utils
    from torch.distributed.checkpoint import state_dict

    return [
        Place(_state_dict_utils, "_broadcast_tensors"),
        Place(_state_dict_utils, "_distribute_state_dict"),
        Place(state_dict, "_distribute_state_dict"),
    ]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its state dict leaves out."""
    return set(module._non_persistent_buffers_set)
