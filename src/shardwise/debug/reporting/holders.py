"""The parameters and buffers of a step: how each is sharded, and the bytes that every rank holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ...sharding.spec import DTensorSpec
from ...tensor.dtensor import DTensor
from ..drawing.spec import axis_texts
from ..holding_table import held_bytes


@dataclass(frozen=True)
class Held:
    """A parameter or buffer."""

    name: str
    kind: str
    tensor: Tensor
    rank_bytes: Mapping[int, int]
    """The bytes that each rank holds."""

    @property
    def spec(self) -> DTensorSpec | None:
        """The spec of a distributed tensor; None for a plain one."""
        return self.tensor.spec if isinstance(self.tensor, DTensor) else None

    @property
    def sharding(self) -> str:
        """How it is sharded, as text."""
        return f"plain {list(self.tensor.shape)}" if self.spec is None else repr(self.spec)

    @property
    def axes(self) -> list[tuple[str, str]]:
        """What each mesh axis does."""
        return [] if self.spec is None else axis_texts(self.spec)

    @property
    def total(self) -> int:
        """The bytes of the global tensor."""
        return self.tensor.nbytes

    @property
    def held(self) -> int:
        """The most bytes that a rank holds."""
        return held_bytes(self.tensor)

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.tensor.shape),
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "sharding": self.sharding,
            "mesh": None if self.spec is None else repr(self.spec.mesh_info),
            "axes": dict(self.axes),
            "global_bytes": self.total,
            "rank_bytes": self.held,
        }


def held_tensors(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[Held]:
    """Return what ranks hold of these tensors, in the order in which they are defined."""
    shares: dict[DTensorSpec, dict[int, int]] = {}
    found = []
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                spec = tensor.spec
                held = shares.get(spec) or shares.setdefault(spec, _bytes_by_rank(spec))
            else:
                held = dict.fromkeys(range(dist.get_world_size() if dist.is_initialized() else 1), tensor.nbytes)
            found.append(Held(name, kind, tensor, held))
    return found


def memory_by_rank(tensors: list[Held]) -> dict[int, int]:
    """Return the bytes of all tensors that each rank holds."""
    total: Counter[int] = Counter()
    for tensor in tensors:
        total.update(tensor.rank_bytes)
    return dict(sorted(total.items()))


def _bytes_by_rank(spec: DTensorSpec) -> dict[int, int]:
    info = spec.mesh_info
    return {
        rank: math.prod(spec.local_shape(at)) * spec.dtype.itemsize
        for rank, at in zip(info.ranks, info.coordinates, strict=True)
    }
