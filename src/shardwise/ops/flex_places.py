"""Which sequences, heads and positions a rank computes in `flex_attention`: the global index of its elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sharding.layout import Coordinate, Layout, Run
from ..sharding.mesh import MeshInfo
from ..sharding.runtime import WorldCache
from .attention_method import HEADS, SEQUENCE
from .attention_segments import zigzag_order
from .flex_layouts import FlexLayouts
from .flex_local import Places

_PLACES: WorldCache[tuple[Layout, Layout, Coordinate, int, torch.device], Places] = WorldCache(
    "places of flex attention", max_bytes=1 << 24
)


def places_of(mesh_info: MeshInfo, layouts: FlexLayouts, at: Coordinate, zigzag: int, device: torch.device) -> Places:
    """Return the places of the rank at this coordinate.

    If the sequence was put in head-tail order for `zigzag` ranks, positions are those in the original order.
    """
    cache, key = _PLACES.of(mesh_info.runtime), (layouts.query, layouts.key, at, zigzag, device)
    found = cache.get(key)
    if found is None:
        with torch.inference_mode(False):  # the next call may need gradients
            found = cache[key] = _made(layouts, at, zigzag, device)
    return found


def _made(layouts: FlexLayouts, at: Coordinate, zigzag: int, device: torch.device) -> Places:
    batch, heads, queries, _ = (_indices(runs, device) for runs in layouts.query.runs(at))
    keys = torch.arange(layouts.key.shape[SEQUENCE], device=device)
    if zigzag:
        queries = _original_positions(layouts.query.shape[SEQUENCE], zigzag, device)[queries]
        keys = _original_positions(layouts.key.shape[SEQUENCE], zigzag, device)
    return Places(batch, heads, queries, keys, _heads_of_keys(layouts, at, heads))


def _indices(runs: Sequence[Run], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*run, device=device) for run in runs or [(0, 0)]])


def _original_positions(length: int, ranks: int, device: torch.device) -> Tensor:
    """Return the original position of each token of a sequence in head-tail order."""
    return torch.tensor(zigzag_order(length, ranks), device=device)


def _heads_of_keys(layouts: FlexLayouts, at: Coordinate, heads: Tensor) -> Tensor | None:
    total, shared = layouts.query.shape[HEADS], layouts.key.shape[HEADS]
    held = _indices(layouts.key.runs(at)[HEADS], heads.device)
    if total == shared and torch.equal(held, heads):
        return None
    place = torch.zeros(shared, dtype=torch.long, device=heads.device)
    place[held] = torch.arange(len(held), device=heads.device)
    return place[heads // (total // max(1, shared))]
