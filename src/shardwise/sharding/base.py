"""The base class of DTensor: a tensor with a spec and this rank's local shard.

Everything below `tensor/` knows distributed tensors by this class: how to read one, how to make one, and what to do
after writing one. A `LocalSource` says where the local shard comes from when it is not simply there.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import Tensor

from .spec import DTensorSpec


class LocalSource(Protocol):
    """Where the local shard of a tensor comes from: a collective that is under way, or a view that is replayed."""

    def local(self, tensor: DTensorBase) -> Tensor:
        """The local shard of `tensor`, up to date."""

    def write_back(self, tensor: DTensorBase) -> None:
        """Carry a write to the local shard of `tensor` to where the data belongs."""


class DTensorBase(Tensor):
    """A distributed tensor. `_spec` says how it is sharded; `_local_tensor` is this rank's shard.

    The slot `_local_tensor` is empty while `_source` is set: reading it then asks the source (`DTensor.__getattr__`).
    """

    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: Tensor
    _spec: DTensorSpec
    _source: LocalSource | None = None

    @classmethod
    def wrap(cls, local: Tensor, spec: DTensorSpec) -> Self:
        """The distributed tensor with this local shard and this spec. Nothing is checked or copied."""
        raise NotImplementedError

    @classmethod
    def wrap_view(cls, local: Tensor, spec: DTensorSpec, base: Any, replay: Any) -> Self:
        """The same for a view of `base`; `replay` makes it again where it shares no memory with the base's shard."""
        raise NotImplementedError
