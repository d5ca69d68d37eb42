"""Modules with distributed parameters, and attention over sequences that are sharded by position."""

from ..ops.attention_method import choose_method
from ..ops.sequence_options import attention_over_sequence
from .attention import packed_attention, unzigzag, zigzag
from .distribute import distribute_module
from .replicate import ReplicateModule, replicate
from .shard import shard_parameters

__all__ = [
    "ReplicateModule",
    "attention_over_sequence",
    "choose_method",
    "distribute_module",
    "packed_attention",
    "replicate",
    "shard_parameters",
    "unzigzag",
    "zigzag",
]
