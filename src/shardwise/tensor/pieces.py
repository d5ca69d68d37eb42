"""`DTensor.split`: does the same as the kernel of `split` above autograd, without the cost of dispatching to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from .._torch.above_autograd import called_from_python
from ..dispatch.formulas import mark_join
from ..ops.slices import SPLIT, SPLIT_WITH_SIZES
from ..sharding.base import DTensorBase

_split, _split_with_sizes = called_from_python(SPLIT), called_from_python(SPLIT_WITH_SIZES)


class Pieces(DTensorBase):
    """A fast `split`, for example of joint queries, keys and values in attention modules."""

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Split the tensor into pieces of this size, or of these sizes, along a dim. They are views of it."""
        found: Any = NotImplemented
        if type(dim) is int:
            if type(split_size) is int:
                found = _split(self, split_size, dim)
            elif type(split_size) is list:
                found = _split_with_sizes(self, split_size, dim)
        if found is NotImplemented:
            return super().split(split_size, dim)
        pieces: tuple[Self, ...] = tuple(found)
        node = pieces[0].grad_fn if pieces else None
        if node is not None:
            mark_join(node)
        return pieces
