"""The names of `torch.distributed.tensor.placement_types`: Placement, Shard, Replicate and Partial."""

from .sharding.placement import Partial, Placement, Replicate, Shard

__all__ = ["Placement", "Shard", "Replicate", "Partial"]
