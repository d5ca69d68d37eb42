"""The base class of DTensor: a tensor with a spec and this rank's local shard.

Everything below `tensor/` knows distributed tensors by this class: how to read one, and how to make one.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from .spec import DTensorSpec


class DTensorBase(Tensor):
    """A distributed tensor. `_spec` says how it is sharded; `_local_tensor` is this rank's shard."""

    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: Tensor
    _spec: DTensorSpec

    @classmethod
    def wrap(cls, local: Tensor, spec: DTensorSpec) -> Self:
        """The distributed tensor with this local shard and this spec. Nothing is checked or copied."""
        raise NotImplementedError
