"""Sharded data parallel: parameters are sharded between uses, and gathered while a module computes.

    api         fully_shard, register_fsdp_forward_method, schedule, share_comm_ctx
    module      FSDPModule: the methods of modules under fully_shard
    policies    dtypes and host memory
    axes        which axis of a mesh shards, which one replicates
    specs       the spec of a sharded parameter, also beside other axes
    parameter   a parameter: sharded, gathered, and as the module sees it; `sharded` makes one
    memory      where parameters lie in the flat buffers, as arithmetic; `buffers` are these buffers
    group       the parameters of one call of fully_shard: gathered and freed together
    reduce      their gradients, reduced by one collective
    transfer    the collectives
    schedule    the order of gathers, frees and reductions, as data that prints
    state       the hooks of a module; `root` is what all modules of a root share, `passing` their inputs and outputs
    ranks       code that depends on the rank

`fully_shard` is a placement and a schedule. Parameters are ordinary DTensors, `Shard(0)` over the data axis; the
schedule gathers them before use, frees them after, and reduces their gradients.
"""

from .api import fully_shard, register_fsdp_forward_method, schedule, share_comm_ctx
from .axes import DataParallelMeshDims
from .module import FSDPModule, UnshardHandle
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .schedule import Event, Schedule

__all__ = [
    "fully_shard",
    "FSDPModule",
    "UnshardHandle",
    "register_fsdp_forward_method",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "DataParallelMeshDims",
    "CPUOffloadPolicy",
    "share_comm_ctx",
    "schedule",
    "Schedule",
    "Event",
]
