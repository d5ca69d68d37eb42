"""The states of the blocks of scores in a block mask (skipped, masked, full), and which of them one rank needs.

A mask of the global program lists blocks of global queries and keys. A rank's queries may begin inside a block, and be
anywhere in the sequence. The tables of a mask are read once (`block_states`), and a rank looks up its own queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SKIPPED, MASKED, FULL = 0, 1, 2
"""States of a block: not computed, computed where the mask is True, computed without reading the mask."""

_Tables = tuple[Tensor | None, ...]


class _Read(NamedTuple):
    """The states of a mask's blocks, and the tables that they were read from; no versions if none are counted."""

    tables: _Tables
    versions: list[int] | None
    states: Tensor


_STATES: WeakKeyDictionary[BlockMask, _Read] = WeakKeyDictionary()


def block_states(mask: BlockMask) -> Tensor:
    """Return the state of every block, `[batch or 1, heads or 1, blocks of queries, blocks of keys]`."""
    found = _STATES.get(mask)
    tables = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    versions = _versions(tables)
    if found is None or versions is None or found.versions != versions or not _same(found.tables, tables):
        with torch.inference_mode(False):  # the next call may need gradients
            found = _STATES[mask] = _Read(tables, versions, _states(*tables))
    return found.states


def _versions(tables: _Tables) -> list[int] | None:
    """Return how often each table was written; None if a table is an inference tensor, whose writes are not counted."""
    present = [table for table in tables if table is not None]
    return None if any(table.is_inference() for table in present) else [table._version for table in present]


def _same(tables: _Tables, others: _Tables) -> bool:
    return all(one is other for one, other in zip(tables, others, strict=True))


def _states(counts: Tensor, indices: Tensor, full_counts: Tensor | None, full_indices: Tensor | None) -> Tensor:
    states = MASKED * _listed(counts, indices)
    if full_counts is not None and full_indices is not None:
        states = states.maximum(FULL * _listed(full_counts, full_indices))
    return states


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Return a table with 1 for each block whose index is among the first `counts` of its row."""
    blocks = indices.shape[-1]
    listed = torch.arange(blocks, device=indices.device) < counts.unsqueeze(-1)
    columns = torch.where(listed, indices, blocks).long()
    table = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.int8, device=indices.device)
    return table.scatter(-1, columns, 1)[..., :blocks]


class Blocks(NamedTuple):
    """The states of blocks of `size` queries and keys, for the batch and the heads of a rank."""

    states: Tensor
    size: tuple[int, int]

    def of(self, batch: Tensor, heads: Tensor) -> Blocks:
        """Return the blocks of some sequences and heads, by index. A mask may be the same for all of them."""
        states = self.states
        if states.shape[0] > 1:
            states = states.index_select(0, batch)
        return self._replace(states=states.index_select(1, heads) if states.shape[1] > 1 else states)

    def columns_seen(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return the indices into `keys` of those in blocks that some query sees; None if these are all keys.

        Queries and keys are positions in the sequence. The host waits for the tables.
        """
        rows, columns = queries // self.size[0], keys // self.size[1]
        seen = (self.states.index_select(2, rows.unique()) != SKIPPED).flatten(0, 2).any(0)[columns]
        return None if bool(seen.all()) else seen.nonzero().flatten()

    def allowed(self, queries: Tensor, keys: Tensor, by_mask_mod: Callable[[], Tensor]) -> Tensor:
        """Return which scores count, as a bool tensor that broadcasts to `[batch, heads, queries, keys]`."""
        rows, columns = queries // self.size[0], keys // self.size[1]
        at = self.states.index_select(2, rows).index_select(3, columns)
        return (at == FULL) | ((at == MASKED) & by_mask_mod())


def states_at(states: Tensor, size: tuple[int, int], queries: Tensor, keys: Tensor) -> Tensor:
    """Return the states of the blocks of a rearranged sequence, such as a rank's rows: token i was at `queries[i]`.

    A new block is skipped if all blocks that its tokens come from are skipped, and full if all of them are full.
    """
    rows, columns = (
        _origins(at, its, states.shape[dim]) for at, its, dim in ((queries, size[0], 2), (keys, size[1], 3))
    )

    def count(chosen: Tensor) -> Tensor:
        return rows @ chosen.float() @ columns.transpose(0, 1)

    seen, not_full = count(states != SKIPPED) > 0, count(states != FULL) > 0
    return torch.where(seen, torch.where(not_full, MASKED, FULL), SKIPPED).to(torch.int8)


def _origins(positions: Tensor, size: int, blocks: int) -> Tensor:
    """Return a table with 1 where a token of a new block comes from an old block, `[new blocks, old blocks]`."""
    new = torch.arange(len(positions), device=positions.device) // size
    found = torch.zeros(-(-len(positions) // size), blocks, device=positions.device)
    found[new, positions // size] = 1.0
    return found


def lists_of(states: Tensor, state: int) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row have a state, and lists of all blocks in which these come first."""
    chosen = (states == state).to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)
