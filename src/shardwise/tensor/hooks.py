"""Methods of DTensor that `torch.compile`, `torch.distributed.checkpoint` and programs for PyTorch's DTensor use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._torch.fake_tensors import STAND_INS
from ..dispatch.watch import mark_exposed
from ..sharding.base import DTensorBase
from ..sharding.mesh import mesh_info_of
from ..world import shards_of
from .autograd import to_spec
from .flat import Context, context_on, flatten, relate_sizes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Hooks(DTensorBase):
    """The methods by which the compiler flattens a tensor, and checkpoints find its shards."""

    @property
    def _local_tensor(self) -> Tensor:
        """PyTorch's name for the local shard. Programs that read it may write it, also by its address."""
        local = self._local_shard
        mark_if_in_memory(local)
        return local

    @_local_tensor.setter
    def _local_tensor(self, local: Tensor) -> None:
        mark_if_in_memory(local)
        self._local_shard = local

    # ---- the compiler: see tensor/flat.py -----------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        """Return the names of inner tensors, and the context to rebuild this one with sizes that are given then."""
        return flatten(self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], context: Context, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> DTensorBase:
        """Rebuild a tensor from `__tensor_flatten__`."""
        local, mesh = inner_tensors["_local_tensor"], inner_tensors.get("device_mesh")
        made = context_on(mesh_info_of(mesh) if mesh is not None else None, context)
        relate_sizes(made, local, outer_size)
        tensor: Any = DTensorBase.concrete.wrap(local, made.spec(outer_size, outer_stride, local.dtype))
        return tensor.requires_grad_() if context.requires_grad else tensor

    def __coerce_tangent_metadata__(self) -> DTensorBase:
        """Return this tensor with the spec of a gradient: the backward pass is traced with it."""
        return to_spec(self, self._spec.cotangent())

    def __coerce_same_metadata_as_tangent__(
        self, expected: Context, expected_type: type | None = None
    ) -> Tensor | None:
        """Return this gradient with the placements that the backward pass was traced with; None if impossible."""
        context = context_on(self._spec.mesh_info, expected)
        if expected_type not in (None, DTensorBase.concrete) or context.mesh() is not self._spec.mesh_info:
            return None
        return to_spec(self, context.spec(self.shape, None, self.dtype))

    @classmethod
    def __metadata_guard__(cls, traced: Context, given: Context) -> bool:
        """Return whether a graph that was traced with one context is valid for another."""
        return traced == given

    # ---- torch.distributed.checkpoint ---------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this process writes, for torch.distributed.checkpoint."""
        from .checkpoint import write_items  # with all of torch.distributed.checkpoint, half a second of importing

        return write_items(fqn, self._local_shard, self._spec)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this process reads, for torch.distributed.checkpoint."""
        from .checkpoint import chunk_list

        return chunk_list(self._local_shard, self._spec)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the shard at an index, for torch.distributed.checkpoint."""
        from .checkpoint import shard_at

        return shard_at(index, self._local_tensor, self._spec)


def mark_if_in_memory(local: Tensor) -> None:
    """Record that a program has this local shard. A stand-in in a compiler's trace has no memory to write."""
    if not any(isinstance(shard, STAND_INS) for shard in shards_of(local)):
        mark_exposed(local)
