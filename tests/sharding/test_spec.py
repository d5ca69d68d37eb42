"""Specs: interned, frozen, printed the way people think."""

import copy
import dataclasses
import pickle

import pytest
import torch

from shardwise import (
    DTensorSpec,
    InterleavedShard,
    P,
    Partial,
    Replicate,
    Shard,
    ShardOrderEntry,
    TensorMeta,
    init_device_mesh,
    simulate,
)
from shardwise.errors import InputError, LayoutError, PlacementError
from shardwise.sharding.layout import Factor, Layout
from shardwise.sharding.mesh import mesh_info_of
from shardwise.sharding.placement import AnyShard
from shardwise.sharding.spec import contiguous_meta
from tests.worlds import mesh_of

F32 = contiguous_meta((8, 16), torch.float32)


@pytest.fixture
def mesh():
    with mesh_of(2, 4, names=("dp", "tp")) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ([Partial(), Shard(1)], "f32[8, 16@tp] sum(dp)"),
        ([Shard(0), Shard(1)], "f32[8@dp, 16@tp]"),
        ([Shard(0), Shard(0)], "f32[8@(dp, tp), 16]"),
        (P(("tp", "dp")), "f32[8@(tp, dp), 16]"),
        ([Replicate(), Replicate()], "f32[8, 16]"),
        ([Partial("max"), Partial("avg")], "f32[8, 16] max(dp) avg(tp)"),
        ([Replicate(), InterleavedShard(1, 2)], "f32[8, (2 8@tp)]"),
    ],
)
def test_prints(mesh, placements, text):
    assert repr(DTensorSpec(mesh, placements, F32)) == text


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.int64, "i64"), (torch.bool, "bool"), (torch.float8_e4m3fn, "float8_e4m3fn")],
)
def test_prints_its_dtype(mesh, dtype, name):
    assert repr(DTensorSpec(mesh, [Replicate()] * 2, contiguous_meta((), dtype))) == f"{name}[]"


def test_normalisation(mesh):
    # Negative dims and the tensor-dim form are other spellings of the same spec.
    spec = DTensorSpec(mesh, [Replicate(), Shard(1)], F32)
    assert DTensorSpec(mesh, [Replicate(), Shard(-1)], F32) is spec
    assert DTensorSpec(mesh, P(None, "tp"), F32) is spec
    assert DTensorSpec(mesh, (Replicate(), InterleavedShard(-1, 1)), F32) is spec
    assert DTensorSpec(mesh, [Replicate(), Shard(1)], F32, (ShardOrderEntry(1, (1,)),)) is spec
    assert spec.placements == (Replicate(), Shard(1))


def test_equal_specs_are_one_object():
    with simulate(8):
        meshes = [init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")) for _ in range(2)]
        one, other = (DTensorSpec(mesh, [Shard(0), Replicate()], F32) for mesh in meshes)
        assert one is other
        # What differs in any part is another spec.
        assert DTensorSpec(meshes[0], [Replicate(), Replicate()], F32) is not one
        assert DTensorSpec(meshes[0], [Shard(0), Replicate()], F32._replace(dtype=torch.float64)) is not one
        assert DTensorSpec(meshes[0], [Shard(0), Replicate()], F32._replace(stride=(1, 8))) is not one
        renamed = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
        assert DTensorSpec(renamed, [Shard(0), Replicate()], F32) is not one


def test_worlds_do_not_share_specs():
    # The same description in a later world has other process groups.
    with mesh_of(2, 4) as mesh:
        spec = DTensorSpec(mesh, [Shard(0), Replicate()], F32)
    with mesh_of(2, 4) as mesh:
        assert DTensorSpec(mesh, [Shard(0), Replicate()], F32) is not spec


def test_copies_are_the_same_object(mesh):
    spec = DTensorSpec(mesh, P(("tp", "dp")), F32)
    assert copy.copy(spec) is spec
    assert copy.deepcopy(spec) is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert spec.with_meta(F32) is spec


def test_replace_as_for_dataclasses(mesh):
    half = contiguous_meta((8, 16), torch.bfloat16)
    order = (ShardOrderEntry(0, (1, 0)),)
    spec = DTensorSpec(mesh, [Shard(0), Shard(0)], F32, order)
    assert dataclasses.replace(spec, tensor_meta=half) is DTensorSpec(mesh, [Shard(0), Shard(0)], half, order)
    with pytest.raises(PlacementError, match="shard order"):
        dataclasses.replace(spec, placements=(Shard(0), Shard(1)))


def test_frozen(mesh):
    spec = DTensorSpec(mesh, [Shard(0), Replicate()], F32)
    for name in ("tensor_meta", "layout", "placements", "anything"):
        with pytest.raises(AttributeError):
            setattr(spec, name, None)
    assert spec.tensor_meta == F32


@pytest.mark.parametrize(
    ("placements", "dim_map", "num_shards_map", "sums"),
    [
        ([Replicate(), Replicate()], [-1, -1], [1, 1], []),
        ([Shard(0), Replicate()], [0, -1], [2, 1], []),
        ([Shard(1), Shard(0)], [1, 0], [4, 2], []),
        ([Partial(), Shard(1)], [-1, 1], [1, 4], [0]),
        ([Partial(), Partial("max")], [-1, -1], [1, 1], [0, 1]),
        ([InterleavedShard(1, 2), Replicate()], [-1, 0], [1, 2], []),
    ],
)
def test_summaries(mesh, placements, dim_map, num_shards_map, sums):
    spec = DTensorSpec(mesh, placements, F32)
    assert spec.dim_map == dim_map
    assert spec.num_shards_map == num_shards_map
    assert spec.num_shards == num_shards_map[0] * num_shards_map[1]
    assert spec.sums == sums
    assert spec.is_sharded() == any(isinstance(placement, AnyShard) for placement in placements)
    assert spec.is_replicated() == all(placement.is_replicate() for placement in placements)


def test_dim_map_has_no_word_for_two_axes_on_one_dim(mesh):
    spec = DTensorSpec(mesh, [Shard(0), Shard(0)], F32)
    with pytest.raises(LayoutError, match="shard_order"):
        _ = spec.dim_map
    assert spec.num_shards_map == [8, 1]


def test_shard_order(mesh):
    assert DTensorSpec(mesh, [Shard(0), Shard(0)], F32).shard_order == (ShardOrderEntry(0, (0, 1)),)
    reverse = DTensorSpec(mesh, P(("tp", "dp")), F32)
    assert reverse.shard_order == (ShardOrderEntry(0, (1, 0)),)
    assert reverse.placements == (Shard(0), Shard(0))
    assert reverse is DTensorSpec(mesh, [Shard(0), Shard(0)], F32, (ShardOrderEntry(0, (1, 0)),))
    assert DTensorSpec(mesh, [Shard(1), Shard(0)], F32).shard_order == (
        ShardOrderEntry(0, (1,)),
        ShardOrderEntry(1, (0,)),
    )


def test_sizes(mesh):
    spec = DTensorSpec(mesh, [Shard(0), Shard(1)], contiguous_meta((5, 6), torch.float16))
    assert (spec.shape, spec.stride, spec.ndim, spec.dtype) == (torch.Size([5, 6]), (6, 1), 2, torch.float16)
    assert spec.mesh is spec.device_mesh is mesh
    # 5 rows over 2 ranks and 6 columns over 4: the last ranks hold less, or nothing.
    assert spec.local_shape((0, 0)) == (3, 2)
    assert spec.local_shape((1, 3)) == (2, 0)
    assert spec.global_offset((1, 1)) == (3, 2)


def test_cotangent(mesh):
    # Shard stays Shard, Replicate stays Replicate, Partial becomes Replicate.
    spec = DTensorSpec(mesh, [Partial(), Shard(1)], F32)
    assert spec.cotangent() is DTensorSpec(mesh, [Replicate(), Shard(1)], F32)
    assert spec.cotangent().cotangent() is spec.cotangent()


@pytest.mark.parametrize(
    ("placements", "order", "error", "says"),
    [
        ([Shard(0)], None, PlacementError, "1 placement"),
        ([Shard(0)] * 3, None, PlacementError, "3 placements"),
        ([Shard(2), Replicate()], None, PlacementError, "dp"),
        ([Replicate(), Shard(-3)], None, PlacementError, "tp"),
        (Shard(0), None, InputError, "list"),
        (["dp", None], None, InputError, "dp"),
        ([InterleavedShard(0, 3), Replicate()], None, LayoutError, "3 blocks"),
        ([Shard(0), Shard(0)], (ShardOrderEntry(0, (0,)),), PlacementError, "shard order"),
        ([Shard(0), Shard(0)], (ShardOrderEntry(1, (0, 1)),), PlacementError, "shard order"),
        ([Shard(0), Shard(0)], (ShardOrderEntry(0, (0, 0)),), PlacementError, "shard order"),
    ],
)
def test_refuses(mesh, placements, order, error, says):
    with pytest.raises(error, match=says):
        DTensorSpec(mesh, placements, F32, order)


def test_zero_dim_tensors_cannot_be_cut(mesh):
    scalar = TensorMeta(torch.Size([]), (), torch.float32)
    assert DTensorSpec(mesh, [Partial(), Replicate()], scalar).sums == [0]
    with pytest.raises(PlacementError, match="0-dim"):
        DTensorSpec(mesh, [Shard(0), Replicate()], scalar)


def test_derived_specs_are_cached_on_the_spec(mesh):
    spec = DTensorSpec(mesh, [Partial(), Shard(1)], TensorMeta(torch.Size([8, 16]), (1, 8), torch.float32))
    half = spec.with_dtype(torch.float16)
    assert (half.dtype, half.stride, half.placements) == (torch.float16, (1, 8), spec.placements)
    assert spec.with_dtype(torch.float16) is half
    assert spec.with_dtype(torch.float32) is spec
    assert spec.replicated().placements == (Replicate(), Replicate())
    assert spec.replicated().stride == (1, 8)
    assert spec.replicated().replicated() is spec.replicated()
    assert spec.replicated(row_major=True).stride == (16, 1)
    assert spec.replicated(row_major=True).is_replicated()
    assert spec.cotangent().placements == (Replicate(), Shard(1))
    assert spec.cotangent().cotangent() is spec.cotangent()
    made = []
    for _ in range(2):
        spec.derived("key", lambda: made.append(spec) or spec.replicated())
    assert made == [spec]


def test_a_spec_caches_a_bounded_number_of_others(mesh):
    spec = DTensorSpec(mesh, [Partial(), Shard(1)], F32)
    for key in range(1000):
        spec.derived(key, spec.cotangent)
    assert len(spec._derived) <= 256


def test_the_cotangent_of_a_layout_without_placements(mesh):
    layout = Layout.make((2, 4), [(Factor(2, ()), Factor(2, (0,)), Factor(4, ())), (Factor(16, ()),)], ((1, "sum"),))
    meta = contiguous_meta((16, 16), torch.float32)
    spec = DTensorSpec.from_layout(mesh_info_of(mesh), layout, meta)
    assert spec.cotangent().layout is layout.without_partial()


def test_with_placements(mesh):
    spec = DTensorSpec(mesh, [Partial(), Shard(1)], TensorMeta(torch.Size([8, 16]), (1, 8), torch.float32))
    moved = spec.with_placements([Shard(0), Replicate()])
    assert (moved.placements, moved.stride) == ((Shard(0), Replicate()), (16, 1))  # moved data is row-major
    assert spec.with_placements((Shard(0), Replicate())) is moved
    assert spec.with_placements(P("dp")) is moved
    assert spec.with_placements([Partial(), Shard(-1)]) is spec
    with pytest.raises(InputError, match="the placement of axis tp is"):
        spec.with_placements([Replicate(), [Shard(0)]])
    with pytest.raises(InputError, match="placements is 'cotangent'"):
        spec.with_placements("cotangent")
