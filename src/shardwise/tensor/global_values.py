"""Methods of DTensor that gather the values of the global tensor, and those that need memory, which raise errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.replicated import as_replicated
from ..sharding.base import DTensorBase


def _needs_memory(name: str) -> Callable[..., NoReturn]:
    """Return the method of this name, which raises an error: it is for tensors with memory of their own."""

    def method(self: DTensorBase, *args: object, **kwargs: object) -> NoReturn:
        raise InputError(
            f"{name} of {self._spec!r}: a DTensor has no memory of its own, only its local shards have",
            "call it on the local shard of a rank, x.shards[rank], or, on processes, on x.full_tensor()",
        )

    return method


class GlobalValues(DTensorBase):
    """Methods that return values as Python objects, and gather them; those that share memory raise an error."""

    def tolist(self) -> Any:
        """Return the global tensor as nested lists."""
        with torch.no_grad():
            return _gathered(self).tolist()

    def new_tensor(self, data: object, *args: Any, **options: Any) -> Tensor:
        """Return a replicated tensor with this data and, unless the options give another, the dtype of this tensor.

        A copy of a plain tensor stays plain: unlike numbers and lists, it may differ between ranks.
        """
        made = super().new_tensor(data, *args, **options)
        return made if isinstance(data, Tensor) else as_replicated(made, self).requires_grad_(made.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the global tensor as a numpy array."""
        return _gathered(self).numpy(force=force)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else repr(self)

    share_memory_ = _needs_memory("share_memory_")
    apply_ = _needs_memory("apply_")
    map_ = _needs_memory("map_")
    __dlpack__ = _needs_memory("__dlpack__")

    def storage(self) -> NoReturn:
        """Raise an error. Libraries that write tensors to files, such as safetensors, call this."""
        raise InputError(
            f"{self._spec!r} is a DTensor and has no storage that holds its values, as safetensors and the libraries "
            "that use it need",
            "save a model with shardwise.hub.save(model, folder) on all ranks; or save full tensors: "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict, or x.full_tensor() for one tensor",
        )

    @property
    def fsdp_pre_all_gather(self) -> NoReturn:
        """Raise an error: PyTorch's `fully_shard` looks for this method in local shards, not in DTensors."""
        raise InputError(
            f"PyTorch's fully_shard got the parameter {self._spec!r}, and knows its own class of DTensors only",
            "call shardwise.install() before all other imports, or start the program with python -m shardwise.run; or "
            "shard over all axes with shardwise: parallelize_module(model, mesh, plan), shard_parameters(model, mesh)",
        )


def _gathered(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor()
    return found
