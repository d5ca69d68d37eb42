"""The names of `torch.distributed.tensor.placement_types`: Placement, Shard, Replicate and Partial.

Programs written for PyTorch import the other names from there, too.
"""

from .sharding import placement
from .sharding.placement import Partial, Placement, Replicate, Shard
from .sharding.spec import DTensorSpec as DTensorSpec
from .sharding.spec import TensorMeta as TensorMeta

_Partial = Partial
_MaskPartial = placement.MaskPartial
_StridedShard = placement.InterleavedShard

__all__ = ["Placement", "Shard", "Replicate", "Partial"]
