"""How large a dim is of which a module is handed a local part, without asking the other ranks each time.

A rank sees its own part. `DTensor.from_local` asks the others for theirs: a collective, and a wait for its result. But
most local parts that go into a module came out of another one, and what comes out is known in whole. So the sizes that
were handed out are remembered, alike on all ranks, and a part that can come from just one of them is a part of that.

A module asks on its first call. If the size is the one handed out last, it relies on what is handed out from then on: a
part that fits none of it is an error on that rank. Otherwise its inputs come from elsewhere, and it asks on every call.
In a simulated world all parts are at hand, and nobody need ask.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..errors import ShapeError
from ..sharding.from_placements import from_placements
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Shard
from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor

_RECENT = 10_000
"""A size is forgotten after so many others were handed out: else one odd batch would make all later ones ask."""

_Key = tuple[MeshInfo, int, int]  # a mesh of one axis; the number of dims; the cut dim


class _HandedOut:
    """The sizes that left as local parts, and when they last did."""

    def __init__(self) -> None:
        self.count = 0
        self.last: dict[_Key, dict[int, int]] = {}

    def add(self, key: _Key, size: int) -> None:
        self.count += 1
        self.last.setdefault(key, {})[size] = self.count

    def recent(self, key: _Key) -> list[int]:
        found = self.last.get(key, {})
        return [size for size, when in found.items() if when > self.count - _RECENT]

    def latest(self, key: _Key) -> int | None:
        found = self.last.get(key)
        return max(found, key=found.__getitem__) if found else None


_handed_out = _HandedOut()


def mark_exposed(spec: DTensorSpec) -> None:
    """Remember what is about to leave as local parts of a mesh of one axis."""
    found = _handed(spec)
    if found is not None:
        _handed_out.add(*found)


@lru_cache(maxsize=4096)
def _handed(spec: DTensorSpec) -> tuple[_Key, int] | None:
    (placement,) = spec.placements
    if type(placement) is not Shard or spec.mesh_info.simulated:
        return None
    return (spec.mesh_info, spec.ndim, placement.dim), spec.shape[placement.dim]


class KnownSizes:
    """What one module knows of the local parts it is handed."""

    def __init__(self, mesh_info: MeshInfo, placement: Shard) -> None:
        self.mesh_info, self.placement = mesh_info, placement
        self.relies: bool | None = None  # on what was handed out; None before the first call

    def whole_shape(self, local: Tensor) -> tuple[int, ...] | None:
        """The whole tensor's shape; None where the ranks must ask each other."""
        if self.mesh_info.simulated or not self.relies:
            return None
        dim = self.placement.dim % local.dim()
        sizes, mine = _handed_out.recent((self.mesh_info, local.dim(), dim)), local.shape[dim]
        fitting = [size for size in sizes if _parts(self.mesh_info, size)[self.mesh_info.coordinate[0]] == mine]
        if not fitting:
            raise ShapeError(
                f"a local part of size {mine} in dim {dim}, of none of the tensors {sorted(sizes)} that were cut over "
                f"{self.mesh_info!r}, where earlier inputs of this module came from",
                "pass a DTensor: DTensor.from_local(part, mesh, placements)",
            )
        if any(_mistakable(self.mesh_info, fitting[0], other) for other in sizes):
            return None
        return (*local.shape[:dim], fitting[0], *local.shape[dim + 1 :])

    def learn(self, whole: DTensor) -> None:
        """What the first call showed."""
        if self.relies is None and not self.mesh_info.simulated:
            dim = self.placement.dim % whole.dim()
            self.relies = whole.shape[dim] == _handed_out.latest((self.mesh_info, whole.dim(), dim))


@lru_cache(maxsize=1024)
def _parts(mesh_info: MeshInfo, size: int) -> tuple[int, ...]:
    layout = from_placements(mesh_info.sizes, (size,), (Shard(0),))
    return tuple(layout.local_shape((index,))[0] for index in range(mesh_info.sizes[0]))


@lru_cache(maxsize=1024)
def _mistakable(mesh_info: MeshInfo, size: int, other: int) -> bool:
    """Whether some rank cannot tell a part of one from a part of another. All ranks answer alike."""
    return size != other and any(a == b for a, b in zip(_parts(mesh_info, size), _parts(mesh_info, other), strict=True))
