"""Extending shardwise: rules for your own ops, and local functions over distributed tensors.

>>> register_sharding(torch.ops.mylib.scale_rows.default, "m n, m -> m n ; linear 0 | 1")
>>> attend = local_map(my_attention, out_placements=[Shard(1)], in_placements=([Shard(1)], [Shard(1)], [Shard(1)]))
"""

from .local_function import local_map
from .register import register_sharding

__all__ = ["local_map", "register_sharding"]
