"""The placements at the path where programs for `torch.distributed.tensor` look for them."""

from .sharding.placement import Partial, Placement, Replicate, Shard

__all__ = ["Placement", "Shard", "Replicate", "Partial"]
