"""Modules with distributed parameters: distribute_module, shard_parameters."""

from .distribute import distribute_module
from .shard import shard_parameters

__all__ = ["distribute_module", "shard_parameters"]
