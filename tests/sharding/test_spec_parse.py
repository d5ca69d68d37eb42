"""Specs read from text: what is printed can be read again, and mistakes are shown where they are."""

import itertools

import pytest
import torch

from shardwise import DTensorSpec, InterleavedShard, Partial, Replicate, Shard
from shardwise.errors import PlacementError
from shardwise.sharding.placement import ShardOrderEntry
from shardwise.sharding.spec import contiguous_meta
from shardwise.sharding.spec_parse import parse_spec
from tests.worlds import mesh_of

KINDS = [Replicate(), Shard(0), Shard(1), InterleavedShard(1, 2), Partial(), Partial("max")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_what_is_printed_can_be_read(dtype):
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        for placements in itertools.product(KINDS, repeat=2):
            for shape in [(8, 8), (12, 16), (1, 4)]:
                spec = DTensorSpec(mesh, placements, contiguous_meta(torch.Size(shape), dtype))
                again = parse_spec(repr(spec), mesh)
                assert (again.layout, again.shape, again.dtype) == (spec.layout, spec.shape, spec.dtype)
                assert repr(again) == repr(spec)


def test_shard_order_scalars_and_spaces():
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        ordered = DTensorSpec(mesh, [Shard(0)] * 2, contiguous_meta(torch.Size((8,)), torch.float32), (
            ShardOrderEntry(0, (1, 0)),
        ))  # fmt: skip
        assert parse_spec("f32[8@(tp,dp)]", mesh) is ordered
        assert repr(parse_spec(" f32 [ 8 @ ( tp , dp ) ] ", mesh)) == "f32[8@(tp, dp)]"
        assert repr(parse_spec("f32[] sum(dp)", mesh)) == "f32[] sum(dp)"
        assert parse_spec("float32[4]", mesh) is parse_spec("f32[4]", mesh)


@pytest.mark.parametrize(
    ("text", "problem", "marked"),
    [
        ("f31[8]", "no dtype f31", "f31"),
        ("f32(8)", "'(' where '[' is expected", "("),
        ("f32[8@dq]", "no axis dq", "dq"),
        ("f32[8@dp, 4@dp]", "axis dp is used twice", "dp"),
        ("f32[8@dp] sum(dp)", "axis dp is used twice", "dp"),
        ("f32[x]", "'x' is no size", "x"),
        ("f32[8 4]", "'4' where ',' is expected", "4"),
        ("f32[8] foo(dp)", "no reduction 'foo'", "foo"),
        ("f32[8] sum", "'(' is missing", " "),
        ("f32[8", "',' is missing", " "),
        ("f32[(8 4", "a size is missing", " "),
        ("", "a dtype is missing", " "),
    ],
)
def test_mistakes_are_shown_where_they_are(text, problem, marked):
    with mesh_of(2, 2, names=("dp", "tp")) as mesh, pytest.raises(PlacementError) as raised:
        parse_spec(text, mesh)
    first, shown, arrow, *_ = str(raised.value).splitlines()
    assert problem in first
    start, length = arrow.index("^") - 4, arrow.count("^")
    assert f"position {start} " in first
    assert (shown[4:] + " ")[start : start + length] == marked
