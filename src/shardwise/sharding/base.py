"""The base class of DTensor: a tensor with a spec and this rank's local shard.

The folders below `tensor/` use distributed tensors through this class. A `LocalSource` provides a local shard that is
not available yet, or that must be recomputed.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from .._torch.ops import OpOverload
from .spec import DTensorSpec


class ReplayedCall(Protocol):
    """The call of a view op that is made again after its root has changed."""

    @property
    def root(self) -> DTensorBase:
        """The tensor that is viewed."""

    @property
    def func(self) -> OpOverload:
        """The view op."""


class LocalSource(Protocol):
    """Where the local shard of a tensor comes from: a collective in flight, or a view that is replayed."""

    __slots__ = ()

    def local(self, tensor: DTensorBase) -> Tensor:
        """Return the up-to-date local shard of `tensor`."""

    def write_back(self, tensor: DTensorBase) -> None:
        """Propagate a write to the local shard of `tensor` to the tensor that owns the data."""

    def accumulate(self, gradient: DTensorBase, grad: DTensorBase | None) -> DTensorBase | None:
        """Return the `.grad` of a leaf to which `gradient`, which has this source, is added, without its data.

        `grad` is the present `.grad`, None for the first gradient. Return None if accumulation needs the data.
        """
        return None

    def replays(self) -> ReplayedCall | None:
        """Return the call that makes the tensor, if it is a view that is replayed."""
        return None


class DTensorBase(Tensor):
    """A distributed tensor. `_spec` describes how it is sharded; `_local_shard` is this rank's shard.

    The shard is stored in the slot `_shard`. The slot is empty while the data comes from a `_source`.
    """

    __slots__ = ("_shard", "_spec")

    _shard: Tensor
    _spec: DTensorSpec
    _source: LocalSource | None = None
    _handed_out: Any = None
    """The cached alias of the local shard for the user (`tensor/handed_out`)."""
    concrete: ClassVar[type[DTensorBase]]
    """`DTensor`, set where it is defined."""

    @property
    def _local_shard(self) -> Tensor:
        """The local shard, from its source if there is one. The hot path reads the slot itself.

        For the library alone. Users get the shard from methods that record this (`dispatch/watch`).
        """
        try:
            return self._shard
        except AttributeError:
            source = self._source
            return self._shard if source is None else source.local(self)  # None: another thread has read it meanwhile

    @_local_shard.setter
    def _local_shard(self, local: Tensor) -> None:
        self._shard = local

    def alias(self) -> DTensorBase:
        """Return an alias of this tensor that keeps its data when this one gets other data (`x.data = y`)."""
        local = self._local_shard  # waits for a collective in flight
        other = self.wrap(local, self._spec)
        if self._source is not None:
            del other._shard
            other._source = self._source
        return other

    @staticmethod
    def wrap(local: Tensor, spec: DTensorSpec, offset: int | None = None) -> DTensorBase:
        """Return the distributed tensor with this local shard and this spec. Nothing is checked or copied."""
        raise NotImplementedError

    @classmethod
    def wrap_view(cls, local: Tensor, spec: DTensorSpec, base: Any, replay: Any, offset: int) -> Self:
        """Return a view of `base` with this local shard; `replay` recomputes a shard with its own memory."""
        raise NotImplementedError
