"""The kernels of `shardwise::ring_attention` and its gradient: what ranks compute and send.

Each rank keeps its queries, and the blocks of keys and values travel around the ring of ranks. While a rank attends to
one block, the next one is on its way, so it holds two at most. In backward, the gradients of a block follow it, and are
on the block's own rank after one turn. With `rotate="gather"` each rank gathers all keys and values instead.

All ranks pass all blocks on, also those whose keys their queries do not see: in causal attention later ones, in a
sequence of packed documents those of other documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .attention_blocks import Merged, Options, Saved, attend, gradients
from .attention_dropout import kept_weights
from .attention_segments import Pair, pairs_of, segments_of
from .kernel import Arrive, FactorShard, Fetch, LocalCall, Return, Rotate, Steps
from .reduce import wide

SEQUENCE = 2
"""The dim of positions."""


class _Blocks:
    """The share of one rank in a call: which of its queries see which keys of each piece, and how they are computed."""

    def __init__(self, call: LocalCall, shard: FactorShard) -> None:
        self.call, self.shard, self.count = call, shard, len(shard.bounds)
        self.query: Tensor = call["query"]
        self.segments = segments_of(shard.size, shard.bounds, tuple(call["documents"]), call["zigzag"])
        query = 0 if "gradient" not in call.arguments else 1
        self.layout = call.given[query]

    def pairs(self, piece: int) -> list[Pair]:
        """Return the pairs of this rank's segments of queries and the segments of a piece's keys that they see."""
        call, shard = self.call, self.shard
        if call["dropout"] is None and not call["is_causal"] and not call["documents"]:
            queries, keys = (segments_of(shard.size, (shard.bounds[p],))[0] for p in (shard.piece, piece))
            return pairs_of(queries, keys, False)
        return pairs_of(self.segments[shard.piece], self.segments[piece], call["is_causal"])

    def options(self, pair: Pair, piece: int) -> Options:
        """Return how to compute a pair: scale, causality, and its block of the mask and of the dropout mask."""
        call, mask, kept = self.call, self.call["mask"], None
        if mask is not None:
            start = self.shard.bounds[piece][0] + pair.key.row
            rows = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., pair.query.rows, :]
            columns = pair.key.stop - pair.key.start
            mask = rows if mask.shape[-1] == 1 else rows.narrow(-1, start, columns)
        if call["dropout"] is not None:
            positions = (pair.query.start, pair.query.stop), (pair.key.start, pair.key.stop)
            kept = kept_weights(call["dropout"], call["dropout_p"], self.layout, call.at, self.shard.size, *positions)
        return Options(call["scale"], pair.causal, mask, kept, call["dropout_p"])


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Return a block of keys and values as one buffer to send, with a row for each position."""
    return torch.cat([tensor.permute(2, 0, 1, 3).flatten(1) for tensor in (key, value)], 1)


def _unpack(buffer: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values in a buffer, as views shaped like these."""
    batch, heads, _, width = key.shape
    parts = buffer.split([batch * heads * width, batch * heads * value.shape[-1]], 1)
    like = zip(parts, (key, value), strict=True)
    first, second = (part.unflatten(1, (batch, heads, t.shape[-1])).permute(1, 2, 0, 3) for part, t in like)
    return first, second


def _rows(shard: FactorShard, step: int) -> list[int]:
    """Return how many positions each piece holds after `step` rotations."""
    sizes = [stop - start for start, stop in shard.bounds]
    return [sizes[(piece - step) % len(sizes)] for piece in range(len(sizes))]


# ---- forward --------------------------------------------------------------------------------------------------------


def forward(call: LocalCall, shard: FactorShard) -> Steps[tuple[Tensor, Tensor]]:
    """Compute the output and its logsumexp."""
    query, key, value = call["query"], call["key"], call["value"]
    blocks = _Blocks(call, shard)
    output = output_like(query, value, call["dropout"] is not None)
    merged = Merged(output, query.new_empty(query.shape[:-1], dtype=wide(query.dtype)))
    if call["rotate"] == "gather" and blocks.count > 1:
        key, value = yield from _gathered(shard, key, value)
        for piece, (start, stop) in enumerate(shard.bounds):
            rows = slice(start, stop)
            _attend(blocks, merged, piece, key[:, :, rows], value[:, :, rows])
        return merged.results()
    here, coming = (key, value), None
    moving = _pack(key, value) if blocks.count > 1 else None
    for step in range(blocks.count):
        if step + 1 < blocks.count:
            assert moving is not None
            coming = yield Rotate(moving, _rows(shard, step))
        _attend(blocks, merged, (shard.piece - step) % blocks.count, *here)
        if coming is not None:
            moving = yield Arrive(coming)
            here, coming = _unpack(moving, key, value), None
    return merged.results()


def _attend(blocks: _Blocks, merged: Merged, piece: int, key: Tensor, value: Tensor) -> None:
    for pair in blocks.pairs(piece):
        rows, columns = pair.query.rows, pair.key.rows
        query = blocks.query[:, :, rows]
        if query.numel() and key.numel():
            found = attend(query, key[:, :, columns], value[:, :, columns], blocks.options(pair, piece))
            merged.add(rows, *found)


def _gathered(shard: FactorShard, key: Tensor, value: Tensor) -> Steps[tuple[Tensor, Tensor]]:
    everything = [(0, shard.size)] * len(shard.bounds)
    return (
        (yield Fetch(key, SEQUENCE, shard.bounds, everything)),
        (yield Fetch(value, SEQUENCE, shard.bounds, everything)),
    )


def output_like(query: Tensor, value: Tensor, row_major: bool) -> Tensor:
    """Return an empty output in PyTorch's memory order: that of the queries, or row-major without a fused kernel."""
    if query.shape[-1] == value.shape[-1] and not row_major:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


# ---- backward -------------------------------------------------------------------------------------------------------


class _Gradients:
    """The gradients that one rank computes, block by block, in float32 at least."""

    def __init__(self, blocks: _Blocks) -> None:
        self.blocks, call = blocks, blocks.call
        self.of_query = torch.zeros_like(blocks.query, dtype=wide(blocks.query.dtype))
        self.saved = Saved(call["gradient"], call["output"], call["logsumexp"])

    def of(self, piece: int, key: Tensor, value: Tensor, sums: Tensor) -> None:
        """Add a piece's block to the gradients of queries, and to those of keys and values, packed in `sums`."""
        for found, columns in self._pairs(piece, key, value):
            self._add(found, columns, _unpack(sums, key, value))

    def arriving(self, piece: int, key: Tensor, value: Tensor, coming: Tensor | None) -> Steps[Tensor]:
        """Do the same for sums that are in flight, and return them; they are awaited after the first pair is computed.

        Without sums `coming`, they start from zeros.
        """
        sums: Tensor | None = None
        for found, columns in self._pairs(piece, key, value):
            if sums is None:
                sums = self.zeros(key, value) if coming is None else (yield Arrive(coming))
            self._add(found, columns, _unpack(sums, key, value))
        if sums is None:
            sums = self.zeros(key, value) if coming is None else (yield Arrive(coming))
        return sums

    def _pairs(self, piece: int, key: Tensor, value: Tensor) -> Iterator[tuple[Sequence[Tensor], slice]]:
        """Add to the gradients of queries; yield what each pair adds to those of keys and values, with their rows."""
        blocks = self.blocks
        for pair in blocks.pairs(piece):
            rows, columns = pair.query.rows, pair.key.rows
            query = blocks.query[:, :, rows]
            if query.numel() and key.numel():
                saved = Saved(*(tensor[:, :, rows] for tensor in self.saved))
                options = blocks.options(pair, piece)
                found = gradients(saved, query, key[:, :, columns], value[:, :, columns], options)
                self.of_query[:, :, rows].add_(found[0])
                yield found[1:], columns

    def _add(self, found: Sequence[Tensor], columns: slice, sums: Sequence[Tensor]) -> None:
        for gradient, total in zip(found, sums, strict=True):
            total[:, :, columns].add_(gradient)

    def zeros(self, key: Tensor, value: Tensor) -> Tensor:
        """Return packed gradients of these keys and values, filled with zeros."""
        width = key.shape[0] * key.shape[1] * (key.shape[-1] + value.shape[-1])
        return key.new_zeros((key.shape[2], width), dtype=wide(key.dtype))


def backward(call: LocalCall, shard: FactorShard) -> Steps[tuple[Tensor, Tensor, Tensor]]:
    """Compute the gradients of queries, keys and values."""
    key, value = call["key"], call["value"]
    blocks = _Blocks(call, shard)
    mine = _Gradients(blocks)
    if call["rotate"] == "gather" and blocks.count > 1:
        found = yield from _gather_backward(mine, shard, key, value)
    else:
        found = yield from _ring_backward(mine, shard, key, value)
    return mine.of_query.to(call["query"].dtype), found[0].to(key.dtype), found[1].to(value.dtype)


def _ring_backward(mine: _Gradients, shard: FactorShard, key: Tensor, value: Tensor) -> Steps[tuple[Tensor, Tensor]]:
    """Compute the rank's own block last, while its gradients are sent back to it."""
    count = mine.blocks.count
    coming = (yield Rotate(_pack(key, value), _rows(shard, 0))) if count > 1 else None
    sums: Tensor | None = None  # the gradients of the block that comes next, on their way from the rank before
    for step in range(1, count):
        assert coming is not None
        here = yield Arrive(coming)
        coming = (yield Rotate(here, _rows(shard, step))) if step + 1 < count else None
        sums = yield from mine.arriving((shard.piece - step) % count, *_unpack(here, key, value), sums)
        del here
        sums = yield Rotate(sums, _rows(shard, step))
    own = yield from mine.arriving(shard.piece, key, value, sums)
    return _unpack(own, key, value)


def _gather_backward(mine: _Gradients, shard: FactorShard, key: Tensor, value: Tensor) -> Steps[tuple[Tensor, Tensor]]:
    keys, values = yield from _gathered(shard, key, value)
    sums = mine.zeros(keys, values)
    for piece, (start, stop) in enumerate(shard.bounds):
        mine.of(piece, keys[:, :, start:stop], values[:, :, start:stop], sums[start:stop])
    del keys, values
    own = yield Return(sums, 0, shard.bounds, [(0, shard.size)] * len(shard.bounds))
    return _unpack(own, key, value)
