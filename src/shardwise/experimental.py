"""The names of `torch.distributed.tensor.experimental`: implicit_replication, local_map and register_sharding."""

from .dispatch.modes import implicit_replication
from .extend import local_map, register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
