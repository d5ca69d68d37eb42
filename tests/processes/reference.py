"""The meaning of placements, implemented a second time and differently: with torch.chunk on global tensors.

Also random cases (mesh, shape, dtype, source and target placements) that come out the same on every rank.
"""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import DTensor, DTensorSpec, InterleavedShard, P, Partial, Replicate, Shard, TensorMeta
from shardwise.errors import LayoutError

AXES = ("a", "b")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
SHAPES = ((8, 12), (5, 7), (3, 1), (2, 0), (13,), (), (4, 6, 2), (3, 5, 2))


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """The mesh of these sizes with axes named a, b, made once."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])


def assert_same(got: Tensor, want: Tensor, what: str = "") -> None:
    """Same dtype, shape and values, to the bit (zeros of either sign are one)."""
    message = f"{what}: got {got!r}, want {want!r}"
    assert isinstance(got, Tensor), message
    assert not isinstance(got, DTensor), message
    assert (got.dtype, got.shape) == (want.dtype, want.shape), message
    if got.dtype.is_floating_point:
        got, want = got.double(), want.double()
    assert torch.equal(got, want), message


# ---- meaning ---------------------------------------------------------------------------------------------------------


def chunk(tensor: Tensor, dim: int, pieces: int, index: int) -> Tensor:
    """One piece of torch.chunk, which leaves out empty pieces at the end."""
    found = tensor.chunk(pieces, dim)
    return found[index] if index < len(found) else tensor.narrow(dim, tensor.shape[dim], 0)


def cut(whole: Tensor, mesh: DeviceMesh, placements: Any, at: Sequence[int]) -> Tensor:
    """What the rank at a coordinate holds of a global tensor."""
    entries = in_order(mesh, placements, whole.dim())
    for axis, placement in list(entries):
        if isinstance(placement, InterleavedShard) and whole.shape[placement.dim] % placement.blocks:
            # Blocks of unequal sizes are the shards of the axes to its right, which it shards after them.
            entries.remove((axis, placement))
            entries.append((axis, Shard(placement.dim)))
    for axis, placement in entries:
        if isinstance(placement, InterleavedShard) and placement.blocks > 1:
            blocks = whole.unflatten(placement.dim, (placement.blocks, -1))
            piece = chunk(blocks, placement.dim + 1, mesh.size(axis), at[axis])
            whole = piece.flatten(placement.dim, placement.dim + 1)
        elif isinstance(placement, Shard):
            whole = chunk(whole, placement.dim, mesh.size(axis), at[axis])
    return whole


def in_order(mesh: DeviceMesh, placements: Any, ndim: int) -> list[tuple[int, Any]]:
    """The axes and their placements, those that cut one dim major to minor."""
    if not isinstance(placements, P):
        return list(enumerate(placements))
    named = {}
    for dim, names in enumerate(placements.dims):
        for name in names if isinstance(names, tuple) else (names,):
            if name is not None:
                named[AXES.index(name)] = Shard(dim)
    for name, op in placements.partial.items():
        named[AXES.index(name)] = Partial(op)
    rest = {axis: Replicate() for axis in range(mesh.ndim) if axis not in named}
    return [*named.items(), *rest.items()]


def reduced(operands: Tensor, ops: Sequence[str | None]) -> Tensor:
    """The value of operands stacked along one leading dim for each axis; the last axis is reduced first."""
    for op in reversed(ops):
        operands = _reduce(operands, len(ops) - 1, op)
        ops = ops[:-1]
    return operands


def _reduce(operands: Tensor, dim: int, op: str | None) -> Tensor:
    dtype = operands.dtype
    if op is None:
        return operands.select(dim, 0)
    if dtype is torch.bool:
        return operands.any(dim) if op in ("sum", "max") else operands.all(dim)
    wide = operands.double() if dtype.is_floating_point else operands
    ways = {"sum": torch.sum, "avg": torch.mean, "product": torch.prod, "max": torch.amax, "min": torch.amin}
    return ways[op](wide, dim).to(dtype)


# ---- cases -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A global tensor, how it is sharded or which operands make it up, and how it should be sharded."""

    mesh: DeviceMesh
    whole: Tensor
    operands: Tensor
    source: Any
    target: Any

    def distributed(self) -> DTensor:
        """The tensor with its source placements, from what each rank holds of it."""
        at = self.mesh.get_coordinate()
        assert at is not None
        ops = _ops(self.mesh, self.source, self.whole.dim())
        mine = self.operands[tuple(at[axis] if op else 0 for axis, op in enumerate(ops))]
        local = cut(mine, self.mesh, self.source, at).clone(memory_format=torch.contiguous_format)
        return DTensor.from_local(local, self.mesh, self.source, shape=self.whole.shape)

    def __str__(self) -> str:
        text = f"{self.whole.dtype} {list(self.whole.shape)} over {tuple(self.mesh.shape)}"
        return f"{text}: {self.source} -> {self.target}"


def random_case(seed: int, mesh: DeviceMesh) -> Case:
    """A case that depends on nothing but the seed and the mesh."""
    draw = random.Random(seed)
    shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
    source, target = (_random_placements(draw, mesh, shape, dtype) for _ in range(2))
    ops = _ops(mesh, source, len(shape))
    numbers = torch.Generator().manual_seed(seed)
    # Small integers, so that no reduction rounds.
    operands = torch.randint(-2, 3, (*mesh.shape, *shape), generator=numbers).to(dtype)
    return Case(mesh, reduced(operands, ops), operands, source, target)


def _ops(mesh: DeviceMesh, placements: Any, ndim: int) -> list[str | None]:
    kinds = dict(in_order(mesh, placements, ndim))
    return [kinds[a].reduce_op if isinstance(kinds[a], Partial) else None for a in range(mesh.ndim)]


def _random_placements(draw: random.Random, mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype) -> Any:
    ops = ["sum", "product"]
    ops += [] if dtype.is_complex else ["max", "min"]
    ops += ["avg"] if dtype.is_floating_point or dtype.is_complex else []
    while True:
        kinds: list[Any] = [Replicate(), Partial(draw.choice(ops))]
        kinds += [Shard(dim) for dim in range(len(shape))] * 2
        kinds += [InterleavedShard(dim, 2) for dim in range(len(shape))]
        placements = [draw.choice(kinds) for _ in mesh.shape]
        meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), dtype)
        try:
            DTensorSpec(mesh, placements, meta)
        except LayoutError:
            continue
        if mesh.ndim == 2 and placements[0] == placements[1] and type(placements[0]) is Shard:
            return P(*[None] * placements[0].dim, draw.choice([("a", "b"), ("b", "a")]))
        return placements


def plain_placements(mesh: DeviceMesh, ndim: int) -> list[list[Any]]:
    """All lists of Shard, Replicate and Partial(sum)."""
    kinds = [Replicate(), Partial(), *(Shard(dim) for dim in range(ndim))]
    return [list(each) for each in itertools.product(kinds, repeat=mesh.ndim)]


__all__ = ["Case", "assert_same", "cut", "mesh_of", "plain_placements", "random_case"]
