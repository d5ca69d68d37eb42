"""The simulated world: all ranks of a mesh in this process, in lockstep.

    simulate        entering and leaving a world
    registry        the running worlds and their groups
    rank_tensor     RankTensor: one local tensor per rank
    rank_int        sizes that differ between ranks
    implementation  how an op runs on RankTensors
    rank_op         what running an op on every rank depends on, from its schema
    mapping         running an op on every rank; `writing` for ops that write, `factories` for ops without tensors
    generators      random numbers of ranks
    agreement       whether all ranks have the same value
    aten_ops        the few ops that need functions of their own
    functional_ops  functional collectives; `c10d_ops`: dist.all_reduce and the like; `object_collectives` raise errors
    collectives     the results of collectives on each rank, as plain tensor code
    per_rank        map_ranks and replicate, for code that addresses ranks

>>> with simulate(4):
...     x = map_ranks(lambda rank: torch.full((2,), float(rank)))
...     (x + 1).shards[3]
tensor([4., 4.])
"""

from . import aten_ops, c10d_ops, functional_ops  # noqa: F401  # they register implementations of ops
from .factories import rank_factories
from .per_rank import map_ranks, replicate
from .rank_int import rank_int, values_of
from .rank_tensor import RankTensor, common, shards_of
from .registry import World, current_world, groups_of, register_group
from .simulate import SimulatedWorld, simulate

__all__ = [
    "RankTensor",
    "map_ranks",
    "replicate",
    "common",
    "shards_of",
    "rank_int",
    "values_of",
    "rank_factories",
    "SimulatedWorld",
    "World",
    "simulate",
    "current_world",
    "register_group",
    "groups_of",
]
