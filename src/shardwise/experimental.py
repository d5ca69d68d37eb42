"""What `torch.distributed.tensor.experimental` has: extension points and the switch for plain tensors."""

from .extend import local_map, register_sharding
from .modes import implicit_replication

__all__ = ["implicit_replication", "local_map", "register_sharding"]
