"""Factories such as `torch.zeros` with sizes that differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from .._torch.modes import OwnMode
from .._torch.ops import OpOverload
from .implementation import implementation_of
from .mapping import by_rank

__all__ = ["rank_factories"]


class rank_factories(OwnMode):
    """A mode in which ops without tensor arguments, such as `torch.zeros`, accept sizes that differ between ranks.

    >>> with rank_factories():
    ...     torch.zeros(rank_int([1, 2])).shards
    (tensor([0.]), tensor([0., 0.]))

    It slows down every op inside. `x.new_zeros` needs no mode.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if not types and (by_rank(args) is not None or (kwargs and by_rank(list(kwargs.values())) is not None)):
            return implementation_of(func)(args, kwargs)
        return func(*args, **(kwargs or {}))
