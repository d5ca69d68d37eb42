"""shardwise: distributed tensors for PyTorch.

A `DTensor` is one global tensor, sharded over a mesh of devices. Programs are written as for one device and compute the
same values, gradients and random numbers.

placements    Shard, Replicate, Partial, InterleavedShard, OrderedShard, P
tensors       DTensor, distribute_tensor; zeros, ones, empty, full, rand, randn, randperm
meshes        init_device_mesh: the processes that torchrun started, or simulate(8): 8 ranks in this process
planning      plan, CostModel
moving        DTensor.redistribute, also to another mesh; transfer, plan_transfer: a model's state to another mesh
modes         explicit, implicit_replication, strict_ops
training      accumulate_gradients, bucket_gradients; erase: record a step, and run plain local code from then on
modules       distribute_module, shard_parameters, replicate; parallel styles and plans are in shardwise.parallel,
              fully_shard in shardwise.fsdp
files         shardwise.checkpoint: save, async_save, load and latest; shardwise.hub: models in the files of model hubs
proving       verify: a program on simulated ranks, compared with one device tensor by tensor
take-over     install: shardwise in the place of torch.distributed.tensor, also `python -m shardwise.run program.py`
inspecting    debug: draw, show, explain, report, watch, CommDebugMode
extending     register_sharding, local_map; shardwise.rules.explain shows the rule of an op
"""

from . import debug, experimental, random, rules
from ._torch.dynamo import never_traced
from .comm.cost import CostModel, cost_model, set_cost_model, using_cost_model
from .dispatch.modes import explicit, implicit_replication, strict_ops
from .dropin import find_table_modules, install, table_module, uninstall
from .erasing import erase
from .extend import local_map, register_sharding
from .nn import distribute_module, replicate, shard_parameters
from .sharding.mesh import DeviceMesh, init_device_mesh
from .sharding.placement import (
    InterleavedShard,
    OrderedShard,
    P,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardOrder,
    ShardOrderEntry,
)
from .sharding.spec import DTensorSpec, TensorMeta
from .tensor.creation import distribute_tensor, empty, full, ones, rand, randn, randperm, zeros
from .tensor.dtensor import DTensor, plan
from .tensor.gradient_buckets import bucket_gradients
from .tensor.leaf_gradient import accumulate_gradients
from .transferring import plan_transfer, transfer
from .verifying import verify
from .world import RankTensor, simulate

__all__ = [
    "debug",
    "experimental",
    "random",
    "rules",
    "DTensor",
    "distribute_tensor",
    "distribute_module",
    "shard_parameters",
    "replicate",
    "Shard",
    "Replicate",
    "Partial",
    "Placement",
    "InterleavedShard",
    "OrderedShard",
    "P",
    "ShardOrder",
    "ShardOrderEntry",
    "DTensorSpec",
    "TensorMeta",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "randperm",
    "DeviceMesh",
    "init_device_mesh",
    "simulate",
    "RankTensor",
    "plan",
    "transfer",
    "plan_transfer",
    "accumulate_gradients",
    "bucket_gradients",
    "erase",
    "verify",
    "explicit",
    "implicit_replication",
    "strict_ops",
    "install",
    "uninstall",
    "register_sharding",
    "local_map",
    "CostModel",
    "cost_model",
    "set_cost_model",
    "using_cost_model",
]

# What runs below DTensor's methods and functions. Hooks of styles and `local_map` are traced: they call code of users.
# So are wrappers of PyTorch's own functions in Python, which plain tensors pass as well.
never_traced(
    f"{__name__}.{part}"
    for part in (
        *("_torch", "comm", "debug", "dispatch", "dropin", "erasing", "errors", "fsdp", "interop", "notation", "ops"),
        *("overrides.batch_rules", "overrides.composites", "overrides.data_parallel", "overrides.derivatives"),
        *("overrides.each_rank", "overrides.flex_call", "overrides.install", "overrides.out_arguments"),
        *("overrides.replaced", "overrides.safetensors_writer"),
        *("overrides.state_dicts", "parallel.converters", "parallel.last_input", "random", "rules", "run"),
        *("sharding", "tensor", "testing", "transferring", "verifying", "world"),
    )
)
_DTensorSpec = DTensorSpec  # PyTorch imports it from torch.distributed.tensor by this name
find_table_modules()


def __getattr__(name: str) -> object:
    """Return a module of the table of `dropin`, such as `shardwise._random`, without an import statement."""
    return table_module(name)
