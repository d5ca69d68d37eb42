"""shardwise: one tensor, cut over a mesh of devices, that behaves as on one device.

values      Shard, Replicate, Partial, InterleavedShard, P: how a tensor is cut
tensor      DTensor, distribute_tensor; zeros, ones, empty, full, rand, randn
worlds      init_device_mesh under torchrun, or simulate(8) in this process
planning    plan, CostModel
modes       explicit, implicit_replication, strict_ops
training    accumulate_gradients
modules     distribute_module; styles and plans in shardwise.parallel
extending   register_sharding, local_map
"""

from . import experimental, random
from . import whole as _whole  # noqa: F401  (keeps functions on distributed tensors whole)
from .comm.cost import CostModel, cost_model, set_cost_model, using_cost_model
from .creation import distribute_tensor, empty, full, ones, rand, randn, randperm, zeros
from .extend import local_map, register_sharding
from .gradients import accumulate_gradients
from .mesh import DeviceMesh, init_device_mesh
from .modes import explicit, implicit_replication, strict_ops
from .nn import distribute_module
from .placement import InterleavedShard, P, Partial, Placement, Replicate, Shard, ShardOrder, ShardOrderEntry
from .spec import DTensorSpec, TensorMeta
from .tensor import DTensor, plan
from .world import RankTensor, simulate

__all__ = [
    "experimental",
    "random",
    "DTensor",
    "distribute_tensor",
    "distribute_module",
    "Shard",
    "Replicate",
    "Partial",
    "Placement",
    "InterleavedShard",
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
    "accumulate_gradients",
    "explicit",
    "implicit_replication",
    "strict_ops",
    "register_sharding",
    "local_map",
    "CostModel",
    "cost_model",
    "set_cost_model",
    "using_cost_model",
]
