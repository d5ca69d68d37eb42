"""What `placements` returns rebuilds the tensor from its local shards, or is refused."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
import torch

import shardwise
from shardwise import DTensor, InterleavedShard, OrderedShard, P, Partial, Replicate, Shard, distribute_tensor
from shardwise.errors import InputError, LayoutError, PlacementError
from shardwise.sharding.from_placements import default_order
from shardwise.testing import assemble, make_dtensor
from tests.ops.helpers import ranks


def rebuilt(y: DTensor) -> DTensor:
    return DTensor.from_local(y.to_local(), y.device_mesh, y.placements, shape=y.shape, stride=y.stride())


def check(y: DTensor) -> bool:
    """Whether the placements of a tensor can be read; if so, they rebuild it."""
    try:
        placements = y.placements
    except LayoutError:
        return False
    assert len(placements) == y.device_mesh.ndim
    again = rebuilt(y)
    assert again._spec.layout is y._spec.layout
    assert torch.equal(assemble(again), assemble(y))
    target = [Replicate()] * y.device_mesh.ndim
    assert torch.equal(assemble(y.redistribute(placements=target).redistribute(placements=y.placements)), assemble(y))
    return True


def test_axes_in_another_order() -> None:
    with ranks(2, 2) as mesh:
        x = make_dtensor(torch.arange(8.0), mesh, P(("b", "a")), seed=0)
        assert x.placements == (InterleavedShard(0, blocks=2), Shard(0))
        assert x.shard_order == ((0, (1, 0)),)
        assert check(x)
        assert repr(x._spec) == repr(rebuilt(x)._spec) == "f32[8@(b, a)]"


def test_blocks_that_an_op_renames() -> None:
    with ranks(2, 2) as mesh:
        x = make_dtensor(torch.arange(32.0).view(4, 8), mesh, [Shard(0), Shard(1)], seed=0)
        y = x.flatten()
        assert y.placements == (Shard(0), InterleavedShard(0, blocks=2))
        assert check(y)
        fused = make_dtensor(torch.arange(24.0), mesh, [InterleavedShard(0, 3), Replicate()], seed=0)
        assert check(fused.view(3, 8))
        assert check(fused.view(12, 2))


def test_uneven_shards_in_another_order() -> None:
    with ranks(2, 2) as mesh:
        x = make_dtensor(torch.arange(9.0), mesh, P(("b", "a")), seed=0)
        assert x.placements == (OrderedShard(0, place=1), OrderedShard(0, place=0))
        assert x.shard_order == ((0, (1, 0)),)
        assert check(x)
        assert not any(placement.is_shard() for placement in x.placements)
        assert pickle.loads(pickle.dumps(x.placements)) == x.placements
        assert torch.equal(assemble(x * 2), torch.arange(9.0) * 2)
        for wrong in (
            [OrderedShard(0, 1), Shard(0)],
            [OrderedShard(0, 1), OrderedShard(0, 1)],
            [OrderedShard(0, 1)] * 2,
        ):
            with pytest.raises(PlacementError, match="number all axes of a dim"):
                x.redistribute(placements=wrong)
        with pytest.raises(InputError, match="place='b'"):
            OrderedShard(0, "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3, 7, 9, 10, 15])
def test_blocks_that_are_the_uneven_shards_of_axes_to_the_right(size: int) -> None:
    whole = torch.arange(float(size))
    with ranks(3, 2) as mesh:  # as fully_shard over a writes what is tensor parallel over b
        x = distribute_tensor(whole, mesh, [InterleavedShard(0, 2), Shard(0)])
        assert x._spec.layout is make_dtensor(whole, mesh, P(("b", "a")), seed=0)._spec.layout
        assert torch.equal(assemble(x), whole)
        given = DTensor.from_local(x.to_local(), mesh, [InterleavedShard(0, 2), Shard(0)], shape=(size,), stride=(1,))
        assert torch.equal(assemble(given), whole)
        assert torch.equal(assemble(x.redistribute(placements=[Shard(0), Replicate()])), whole)
        if size % 2:
            for blocks in (2, 4):
                with pytest.raises(LayoutError, match=f"{blocks} blocks"):
                    distribute_tensor(whole, mesh, [InterleavedShard(0, blocks), Replicate()])


def test_three_axes_each_inside_the_next() -> None:
    whole = torch.arange(23.0)
    with ranks(2, 2, 2) as mesh:
        for placements, order in (
            ([InterleavedShard(0, 4), InterleavedShard(0, 2), Shard(0)], ("c", "b", "a")),
            ([InterleavedShard(0, 2), Shard(0), Shard(0)], ("b", "a", "c")),
            ([Shard(0), InterleavedShard(0, 2), Shard(0)], ("a", "c", "b")),
        ):
            x = distribute_tensor(whole, mesh, placements)
            assert x._spec.layout is make_dtensor(whole, mesh, P(order), seed=0)._spec.layout
            assert torch.equal(assemble(x), whole)


def test_a_style_of_local_function_compares_layouts() -> None:
    with ranks(2, 2) as mesh:
        x = make_dtensor(torch.arange(8.0), mesh, P(("b", "a")), seed=0)
        double = shardwise.local_map(
            lambda t: t * 2, out_placements=[InterleavedShard(0, 2), Shard(0)], in_placements=([*x.placements],)
        )
        assert torch.equal(assemble(double(x)), torch.arange(8.0) * 2)


OPS = {
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.reshape(x.numel() // 2, 2) if x.numel() % 2 == 0 else x,
    "split view": lambda x: x.reshape(2, -1) if x.numel() and x.numel() % 2 == 0 else x,
    "transpose": lambda x: x.transpose(0, -1),
    "sum": lambda x: x.sum(0),
    "double": lambda x: x * 2,
    "unsqueeze": lambda x: x.unsqueeze(0),
    "slice": lambda x: x[: x.shape[0] // 2 + 1],
    "cat": lambda x: torch.cat([x, x]),
    "exp": lambda x: x.exp(),
}
DIMS = ((8, 12), (4, 6, 2), (7, 8), (16,), (3, 4, 4))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (2, 2, 2)])
def test_placements_of_any_tensor_rebuild_it(sizes: tuple[int, ...]) -> None:
    draw = random.Random(f"{sizes}")
    seen = refused = 0
    with ranks(*sizes) as mesh:
        names = mesh.mesh_dim_names or ()
        for shape in DIMS:
            for _ in range(12):
                axes = draw.sample(names, len(names))
                dims: list[tuple[str, ...]] = [() for _ in shape]
                partial = {}
                for axis in axes:
                    kind = draw.random()
                    if kind < 0.15:
                        partial[axis] = "sum"
                    elif kind < 0.9:
                        dims[draw.randrange(len(shape))] += (axis,)
                x = make_dtensor(
                    torch.arange(float(torch.Size(shape).numel())).view(shape),
                    mesh,
                    P(*(dim or None for dim in dims), partial=partial),
                    seed=0,
                )
                fn = OPS[draw.choice(sorted(OPS))]
                for y in (x, fn(x)):
                    if y.dim():
                        seen += 1
                        refused += not check(y)
    assert seen > 80
    assert refused < seen / 10  # interleaved and uneven at once


def test_placements_of_every_even_layout() -> None:
    """Plain shardings of a size that all axes divide can always be read, in any order of axes."""
    with ranks(2, 2, 2) as mesh:
        for order in itertools.permutations("abc"):
            x = make_dtensor(torch.arange(16.0), mesh, P(order), seed=0)
            assert check(x)
            x = make_dtensor(torch.arange(16.0).view(2, 8), mesh, P(order[0], order[1:]), seed=0)
            assert check(x)
            assert check(x.flatten())
            partial = make_dtensor(torch.arange(8.0), mesh, P(order[:2], partial={order[2]: "max"}), seed=0)
            assert Partial("max") in partial.placements
            assert check(partial)
            spec = partial._spec
            assert (spec.shard_order == default_order(spec.placements)) == (order[0] < order[1])
