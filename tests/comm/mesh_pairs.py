"""Random pairs of meshes and placements, and what each rank has and needs, as element indices."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DTensorSpec, InterleavedShard, Partial, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.sharding.spec import contiguous_meta
from shardwise.world import values_of
from tests.processes.reference import cut

RANKS = 8
SHAPES = ((8, 12), (5, 7), (3, 1), (2, 0), (13,), (), (4, 6, 2), (12, 5, 2), (16, 8), (7, 24))
KINDS = ("same", "overlapping", "disjoint", "nested")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int16)


class Pair(NamedTuple):
    """A value, and its placements on two meshes."""

    value: Tensor
    meshes: tuple[DeviceMesh, DeviceMesh]
    placements: tuple[Any, Any]


def random_pair(seed: int, ranks: int = RANKS) -> Pair:
    """A pair that depends on nothing but the seed."""
    draw = random.Random(seed)
    shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
    numbers = torch.Generator().manual_seed(seed)
    value = torch.randint(-3, 4, shape, generator=numbers).to(dtype)
    first, second = _rank_sets(draw, KINDS[seed % len(KINDS)], ranks)
    meshes = _mesh(draw, first, "s"), _mesh(draw, second, "t")
    source, target = (_placements(draw, mesh, shape, dtype) for mesh in meshes)
    return Pair(value, meshes, (source, target))


def _rank_sets(draw: random.Random, kind: str, ranks: int) -> tuple[list[int], list[int]]:
    everyone = draw.sample(range(ranks), ranks)
    size = draw.randint(1, ranks)
    some = everyone[:size]
    if kind == "same":
        return some, draw.sample(some, size)
    if kind == "overlapping":
        return some, draw.sample(range(ranks), draw.randint(1, ranks))
    if kind == "nested":
        inner = draw.sample(some, draw.randint(1, size))
        return (some, inner) if draw.random() < 0.5 else (inner, some)
    size = draw.randint(1, ranks - 1)
    return everyone[:size], draw.sample(everyone[size:], draw.randint(1, ranks - size))


def _mesh(draw: random.Random, ranks: list[int], name: str) -> DeviceMesh:
    shapes = [
        sizes
        for count in (1, 2, 3)
        for sizes in itertools.product(range(1, len(ranks) + 1), repeat=count)
        if math.prod(sizes) == len(ranks)
    ]
    sizes = draw.choice(shapes)
    names = tuple(f"{name}{axis}" for axis in range(len(sizes)))
    return DeviceMesh("cpu", torch.tensor(ranks).view(sizes), mesh_dim_names=names)


def _placements(draw: random.Random, mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype) -> Any:
    ops = ["sum", "sum", "max", "min", "product"] + (["avg"] if dtype.is_floating_point else [])
    while True:
        kinds: list[Any] = [Replicate(), *[Shard(dim) for dim in range(len(shape))] * 2]
        kinds += [InterleavedShard(dim, blocks) for dim in range(len(shape)) for blocks in (2, 3)]
        if draw.random() < 0.4:
            kinds += [Partial(draw.choice(ops))] * 2
        placements = [draw.choice(kinds) for _ in mesh.shape]
        try:
            DTensorSpec(mesh, placements, contiguous_meta(shape, dtype))
        except LayoutError:
            continue
        return placements


# ---- element by element ---------------------------------------------------------------------------------------------


def held(mesh: DeviceMesh, placements: Any, shape: Sequence[int]) -> dict[int, set[int]]:
    """The indices of the elements that each rank of a mesh holds."""
    numbers = torch.arange(math.prod(shape)).view(tuple(shape))
    return {rank: set(cut(numbers, mesh, placements, at).flatten().tolist()) for rank, at in coordinates(mesh).items()}


def coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    places = itertools.product(*map(range, mesh.shape))
    return dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))


def needed(mesh: DeviceMesh, placements: Any, shape: Sequence[int]) -> dict[int, set[int]]:
    """The same for a target: ranks that hold the identity of a sum or product need nothing."""
    identities = [a for a, p in enumerate(placements) if isinstance(p, Partial) and p.reduce_op in ("sum", "product")]
    found = held(mesh, placements, shape)
    return {rank: set() if any(at[a] for a in identities) else found[rank] for rank, at in coordinates(mesh).items()}


class Traffic(TorchDispatchMode):
    """The bytes that each rank receives from others, and sends to others, in the all-to-alls of a simulated group."""

    def __init__(self, group: str, ranks: Sequence[int]) -> None:
        super().__init__()
        self.group, self.ranks = group, sorted(ranks)
        self.received = dict.fromkeys(self.ranks, 0)
        self.sent = dict.fromkeys(self.ranks, 0)
        self.rounds: list[dict[int, int]] = []
        """For each collective what each rank sends and receives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default and args[3] == self.group:
            staged = dict.fromkeys(self.ranks, 0)
            for table, splits in ((self.received, args[1]), (self.sent, args[2])):
                for place, rank in enumerate(self.ranks):
                    sizes = [size if values_of(size) is None else values_of(size)[place] for size in splits]
                    assert sizes[place] == 0, "a rank sends to itself"
                    table[rank] += sum(sizes) * args[0].dtype.itemsize
                    staged[rank] += sum(sizes) * args[0].dtype.itemsize
            self.rounds.append(staged)
        return func(*args, **(kwargs or {}))
