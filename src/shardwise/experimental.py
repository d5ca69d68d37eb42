"""What `torch.distributed.tensor.experimental` has: extension points and the switch for plain tensors."""

from .dispatch.modes import implicit_replication
from .extend import local_map, register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
