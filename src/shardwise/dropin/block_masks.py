"""Block masks under context parallel: the rows of a mask that belong to a rank's shard of the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from ..comm.groups import adopt
from ..comm.on_ranks import from_ranks
from ..errors import ShapeError
from ..ops.flex_blocks import FULL, MASKED, block_states, lists_of, states_at
from ..overrides.flex_attention import RankBlockMask
from ..sharding.layout import Coordinate, Factor, Layout
from .load_balancers import _LoadBalancer


def rank_block_mask(mask: BlockMask, mesh: DeviceMesh, balancer: _LoadBalancer | None) -> BlockMask:
    """Return the mask for this rank's queries and all keys, both in the order of the load balancer."""
    queries, keys = mask.seq_lengths
    if queries % mesh.size():
        raise ShapeError(
            f"a block mask of {queries} queries cannot be sharded evenly over {mesh.size()} ranks",
            f"pad the sequence to a multiple of {mesh.size()}",
        )
    indices = None if balancer is None else balancer._generate_indices()
    device = mask.kv_num_blocks.device
    order = torch.arange(keys, device=device)[None] if indices is None else indices.long().to(device)
    mesh_info = adopt(mesh)
    rows = Layout.make(mesh_info.sizes, [(Factor(queries, tuple(range(mesh.ndim))),)])
    tables = {name: from_ranks(mesh_info, partial(_table, name, mask, rows, order)) for name in _NAMES}
    positions, mask_mod = tables.pop("positions"), mask.mask_mod
    kind: Any = RankBlockMask if device.type == "cpu" else BlockMask

    def of_rank(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b if len(order) > 1 else 0
        return mask_mod(b, h, positions[row, q], order[row, k])

    made: BlockMask = kind.from_kv_blocks(
        **tables, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=of_rank, seq_lengths=(queries // mesh.size(), keys)
    )
    return made


_NAMES = "positions", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"


def _table(name: str, mask: BlockMask, rows: Layout, order: Tensor, at: Coordinate) -> Tensor:
    """Return a table of the mask for the rank at this coordinate, or the positions of its queries."""
    ((run, *_),) = rows.runs(at)
    positions, states, size = order[:, run[0] : run[1]], block_states(mask), (mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1])
    made = [
        states_at(states[min(i, len(states) - 1)][None], size, own, keys)
        for i, (own, keys) in enumerate(zip(positions, order, strict=True))
    ]
    ours = torch.cat(made) if len(order) > 1 else states_at(states, size, positions[0], order[0])
    tables = dict(zip(_NAMES, (positions, *lists_of(ours, MASKED), *lists_of(ours, FULL)), strict=True))
    return tables[name]
