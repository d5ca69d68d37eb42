"""The call that made a view which shares no local memory with its base, stored to repeat it after a write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from .._torch.ops import OpOverload
from ..ops.views import write_through
from ..sharding.base import DTensorBase

Root = TypeVar("Root", bound=Tensor)


@dataclass(frozen=True, slots=True, eq=False)
class ViewCall:
    """The view `func(root, *args[1:], **kwargs)`, or its `index`-th result.

    A slice of a sharded dim, for example, may be held by other ranks than the elements that it views.
    """

    root: DTensorBase
    func: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    index: int | None

    def of(self, root: Root) -> Root:
        """Return the same view of another root."""
        result = self.func(root, *self.args[1:], **self.kwargs)
        return result if self.index is None else result[self.index]

    def put(self, root: Tensor, value: Tensor) -> Any:
        """Return a copy of the root with `value` in the place of the view; None if no op computes it."""
        write = write_through(self.func, self.args, self.kwargs, self.index)
        return None if write is None else write(root, value)
