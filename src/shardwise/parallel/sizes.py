"""How large a dim is of which a module is handed a local part, without asking the other ranks each time.

A rank sees its own part. `DTensor.from_local` asks the others for theirs: a collective, and a wait for its result. But
most local parts that go into a module came out of another one, and what comes out is known in whole. So the sizes that
were handed out are remembered, alike on all ranks, and a part that can come from just one of them is a part of that.

A module asks on its first call. If the size was one of those handed out, it relies on them from then on: a part that
fits none of them is an error on that rank. Otherwise its inputs come from elsewhere, and it asks on every call.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import ShapeError
from ..layout import from_placements
from ..mesh import MeshView
from ..placement import Shard
from ..tensor import DTensor

_Key = tuple[MeshView, int, int]  # of a one-axis mesh; number of dims; the cut dim
_handed_out: dict[_Key, set[int]] = {}


def hand_out(tensor: DTensor) -> None:
    """Remember what is about to leave as local parts of a one-axis mesh."""
    (placement,) = tensor.placements
    if type(placement) is Shard:
        _handed_out.setdefault((tensor._spec.view, tensor.dim(), placement.dim), set()).add(tensor.shape[placement.dim])


class KnownSizes:
    """What one module knows of the local parts it is handed."""

    def __init__(self, view: MeshView, placement: Shard) -> None:
        self.view, self.placement = view, placement
        self.relies: bool | None = None  # on what was handed out; None before the first call

    def whole_shape(self, local: Tensor) -> tuple[int, ...] | None:
        """The whole tensor's shape; None where the ranks must ask each other."""
        if self.view.simulated or not self.relies:
            return None
        dim = self.placement.dim % local.dim()
        sizes = _handed_out[self.view, local.dim(), dim]
        mine, shape = local.shape[dim], list(local.shape)
        fitting = [size for size in sizes if _parts(self.view, size)[self.view.coordinate[0]] == mine]
        if not fitting:
            raise ShapeError(
                f"a local part of size {mine} in dim {dim}, of none of the tensors {sorted(sizes)} that were cut over "
                f"{self.view!r}, where earlier inputs of this module came from",
                "pass a DTensor: DTensor.from_local(part, mesh, placements)",
            )
        if any(_mistakable(self.view, fitting[0], other) for other in sizes if other != fitting[0]):
            return None
        shape[dim] = fitting[0]
        return tuple(shape)

    def learn(self, whole: DTensor) -> None:
        """What the first call showed."""
        if self.relies is None:
            dim = self.placement.dim % whole.dim()
            self.relies = whole.shape[dim] in _handed_out.get((self.view, whole.dim(), dim), ())


def _parts(view: MeshView, size: int) -> list[int]:
    layout = from_placements(view.sizes, (size,), (Shard(0),))
    return [layout.local_shape((index,))[0] for index in range(view.sizes[0])]


def _mistakable(view: MeshView, size: int, other: int) -> bool:
    """Whether some rank cannot tell a part of one from a part of the other. All ranks answer alike."""
    return any(mine == its for mine, its in zip(_parts(view, size), _parts(view, other), strict=True))
