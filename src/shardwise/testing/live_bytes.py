"""The bytes of the tensors that are alive in this process: what an op needs besides its operands and results.

>>> with LiveBytes() as counted:
...     y = F.scaled_dot_product_attention(q, k, v)
>>> counted.peak
8388608
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import pytree
from .._torch.modes import OwnMode
from ..sharding.base import DTensorBase
from ..world import RankTensor


class LiveBytes(OwnMode):
    """Counts the memory of local tensors made inside its `with` block; in a simulated world, of all ranks together.

    Temporary memory of kernels in C++ is not counted, nor is memory that existed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: dict[int, StorageWeakRef] = {}
        self.peak = 0
        """The most bytes that were alive at once, since `start`."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(issubclass(kind, (DTensorBase, RankTensor)) for kind in types):
            return NotImplemented  # runs on local tensors, which come back here
        for ref, _ in _storages((args, kwargs)):
            if ref.cdata not in self._alive:
                self._before[ref.cdata] = ref
        result = func(*args, **(kwargs or {}))
        for ref, size in _storages(result):
            if ref.cdata not in self._before:
                self._alive.setdefault(ref.cdata, (ref, size))
        self.peak = max(self.peak, self.alive)
        return result

    @property
    def alive(self) -> int:
        """The bytes that are alive now."""
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        return sum(size for _, size in self._alive.values())

    def start(self) -> None:
        """Forget the peak so far."""
        self.peak = self.alive


def _storages(values: object) -> Iterator[tuple[StorageWeakRef, int]]:
    """Yield the storages of tensors and their sizes. The weak references keep the ids of storages from being reused."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor) and not isinstance(value, (DTensorBase, RankTensor)):
            storage = value.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()
