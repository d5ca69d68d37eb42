"""The simulated world: all ranks of a mesh in this process, in lockstep.

    ranks        RankTensor: one local tensor per rank, every op mapped over them
    rank_int     sizes that differ between ranks
    collectives  communication among them, as plain tensor code
    registry     which world is running, and its groups
    simulate     entering and leaving a world

>>> with simulate(4):
...     x = map_ranks(lambda rank: torch.full((2,), float(rank)))
...     (x + 1).shards[3]
tensor([4., 4.])
"""

from . import collectives as collectives
from .rank_int import rank_int, values_of
from .ranks import RankTensor, common, map_ranks, rank_factories, replicate
from .registry import World, current_world, groups_of, register_group
from .simulate import SimulatedWorld, simulate

__all__ = [
    "RankTensor",
    "map_ranks",
    "replicate",
    "common",
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
