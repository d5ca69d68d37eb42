"""Full state dicts: `get_state_dict` and `set_state_dict` with `full_state_dict=True`.

PyTorch gathers and distributes tensors of its own class. Here its functions get full tensors only: ours are gathered
before a call, and the results are sharded after it, like the tensors that they replace.
"""

from __future__ import annotations

import functools

from torch import Tensor

from .._torch import pytree
from .._torch.python_functions import Function
from .._torch.state_dicts import distributing_functions, gathering_functions
from ..comm.redistribute import redistribute_local
from ..ops.replicated import as_replicated, gathered
from ..sharding.base import DTensorBase
from .replaced import Replaced

_replaced = Replaced()
_NO_DTENSOR = object()
"""Replaces a distributed tensor in a call: PyTorch replaces what is not its DTensor by the full tensor."""


def install_state_dict_functions() -> None:
    """Wrap PyTorch's functions that gather and distribute state dicts. Imports `torch.distributed.checkpoint`."""
    _replaced.replace(gathering_functions(), _gathering)
    _replaced.replace(distributing_functions(), _distributing)


def uninstall_state_dict_functions() -> None:
    """Put the original functions back."""
    _replaced.restore()


def _gathering(original: Function) -> Function:
    @functools.wraps(original)
    def gather(state_dict: dict[str, object], **options: object) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in state_dict.items():  # one by one: the original moves each to the CPU, or drops it
            found.update(original({key: pytree.tree_map_only(DTensorBase, gathered, value)}, **options))  # type: ignore[call-overload]
        return found

    return gather


def _distributing(original: Function) -> Function:
    @functools.wraps(original)
    def distribute(full: dict[str, object], local: dict[str, object], *args: object, **kwargs: object) -> None:
        ours = {key: value for key, value in local.items() if isinstance(value, DTensorBase)}
        # Under take-over our class is PyTorch's DTensor, which the original would fill as one block of the full tensor.
        local.update(dict.fromkeys(ours, _NO_DTENSOR))
        try:
            original(full, local, *args, **kwargs)
        finally:
            for key, like in ours.items():
                if local[key] is _NO_DTENSOR:
                    local[key] = like
        for key, like in ours.items():
            found = local[key]
            if isinstance(found, Tensor) and not isinstance(found, DTensorBase) and found.shape == like.shape:
                local[key] = _sharded(found, like)

    return distribute


def _sharded(full: Tensor, like: DTensorBase) -> DTensorBase:
    """Return a tensor that every rank has in full as one sharded like another one. The result has its own memory."""
    replicated = as_replicated(full, like)
    spec = like._spec.with_meta(replicated._spec.tensor_meta)
    return type(like).concrete.wrap(redistribute_local(replicated._local_shard, replicated._spec, spec).clone(), spec)
