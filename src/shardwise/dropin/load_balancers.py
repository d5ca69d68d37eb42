"""Load balancers of context parallel: the order in which a sequence is put before it is sharded.

With causal attention, the ranks that hold the tail of a sequence compute most. Head-tail balancing gives each rank a
chunk of the head and the chunk of the tail that mirrors it.

>>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices()
tensor([[0, 1, 6, 7, 2, 3, 4, 5]])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError


class _LoadBalancer(ABC):
    """Defines the order of a sequence before it is sharded. Subclasses implement `_generate_indices`."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """Return the index of the element at each position, `[1, sequence]` or `[batch, sequence]`; None for no change.

        With `restore`, return the indices that restore the original order.
        """


class _HeadTailLoadBalancer(_LoadBalancer):
    """Gives each rank one chunk of the head and one of the tail of the sequence."""

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        self.seq_length, self.world_size, self.device = seq_length, world_size, device

    def _generate_indices(self, restore: bool = False) -> Tensor:
        order = _head_tail(self.seq_length, self.world_size)
        return torch.tensor([_inverse(order) if restore else order], device=self.device)


class _PerDocumentHeadTailLoadBalancer(_LoadBalancer):
    """Balances each document by itself: `seq_length_per_doc` has the document lengths of each sequence of a batch."""

    def __init__(self, seq_length_per_doc: list[list[int]], world_size: int, device: str | torch.device) -> None:
        self.seq_length_per_doc, self.world_size, self.device = seq_length_per_doc, world_size, device

    def _generate_indices(self, restore: bool = False) -> Tensor:
        rows = [self._of_sequence(lengths) for lengths in self.seq_length_per_doc]
        return torch.tensor([_inverse(row) if restore else row for row in rows], device=self.device)

    def _of_sequence(self, lengths: Sequence[int]) -> list[int]:
        order: list[int] = []
        for length in lengths:
            order += [len(order) + index for index in _head_tail(length, self.world_size)]
        return order


def _head_tail(length: int, ranks: int) -> list[int]:
    if length % (2 * ranks):
        raise ShapeError(
            f"head-tail order for {ranks} ranks needs {2 * ranks} equal chunks, but the sequence has {length} tokens",
            f"pad it to a multiple of {2 * ranks}",
        )
    chunk = length // (2 * ranks)
    starts = [start * chunk for rank in range(ranks) for start in (rank, 2 * ranks - 1 - rank)]
    return [start + index for start in starts for index in range(chunk)]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
