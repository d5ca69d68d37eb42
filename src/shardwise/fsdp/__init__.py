"""Sharded data parallel: parameters are sharded between uses, and gathered while a module computes.

    api         fully_shard, the methods of FSDPModule, register_fsdp_forward_method, schedule
    policies    dtypes and host memory
    axes        which axis of a mesh shards, which one replicates
    parameter   a parameter: sharded, gathered, and as the module sees it
    memory      where parameters lie in the flat buffers, as arithmetic; `buffers` are these buffers
    group       the parameters of one call of fully_shard: gathered and freed together
    reduce      their gradients, reduced by one collective
    transfer    the collectives
    schedule    what happens when, as data that prints
    state       the hooks of a module, and what all modules of a root share

It is a placement and a schedule. Parameters are ordinary DTensors, `Shard(0)` over the data axis; the schedule gathers
them before use, frees them after, and reduces their gradients.
"""

from .api import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, schedule
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .schedule import Event, Schedule

__all__ = [
    "fully_shard",
    "FSDPModule",
    "UnshardHandle",
    "register_fsdp_forward_method",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "schedule",
    "Schedule",
    "Event",
]
