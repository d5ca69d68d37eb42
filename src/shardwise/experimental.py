"""The names of `torch.distributed.tensor.experimental`."""

from .dispatch.modes import implicit_replication
from .dropin.attention import context_parallel, set_rotate_method
from .extend import local_map, register_sharding

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding", "set_rotate_method"]
__path__: list[str] = []  # `experimental._attention` and others are found in the table of `dropin`
