import itertools
from textwrap import dedent

import pytest
import torch
from torch import nn

import shardwise
from shardwise import InterleavedShard, P, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import draw, visualize_sharding
from shardwise.debug.holdings import grid, holdings, ranks_text


def tensor(shape, placements, axes=None):
    mesh = shardwise.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh = mesh if axes is None else mesh[axes]
    return shardwise.distribute_tensor(torch.zeros(shape), mesh, placements)


PICTURES = [
    (
        (6, 8),
        P("dp", "tp"),
        """\
        f32[6@dp, 8@tp] on mesh(dp=2, tp=4)
              0:2   2:4   4:6   6:8
            ┌─────┬─────┬─────┬─────┐
        0:3 │  0  │  1  │  2  │  3  │
        3:6 │  4  │  5  │  6  │  7  │
            └─────┴─────┴─────┴─────┘""",
    ),
    (
        (10,),
        P(("dp", "tp")),
        """\
        f32[10@(dp, tp)] on mesh(dp=2, tp=4)
           0:2   2:4   4:5   5:7   7:9   9:10
         ┌─────┬─────┬─────┬─────┬─────┬──────┐
         │  0  │  1  │  2  │  4  │  5  │  6   │
         └─────┴─────┴─────┴─────┴─────┴──────┘
        empty shards: 3,7""",
    ),
    (
        (8,),
        [InterleavedShard(0, 2), Replicate()],
        """\
        f32[(2 4@dp)] on mesh(dp=2, tp=4)
           0:2   2:4   4:6   6:8
         ┌─────┬─────┬─────┬─────┐
         │ 0-3 │ 4-7 │ 0-3 │ 4-7 │
         └─────┴─────┴─────┴─────┘""",
    ),
    (
        (4, 4),
        [Partial("max"), Shard(1)],
        """\
        f32[4, 4@tp] max(dp) on mesh(dp=2, tp=4)
                 0:1          1:2          2:3          3:4
            ┌────────────┬────────────┬────────────┬────────────┐
        0:4 │ max(0 | 4) │ max(1 | 5) │ max(2 | 6) │ max(3 | 7) │
            └────────────┴────────────┴────────────┴────────────┘""",
    ),
    (
        (2, 3, 5),
        P(None, None, ("dp", "tp")),
        """\
        f32[2, 3, 5@(dp, tp)] on mesh(dp=2, tp=4)
              0  [:, :, 0:1]
              1  [:, :, 1:2]
              2  [:, :, 2:3]
          3,6,7  empty
              4  [:, :, 3:4]
              5  [:, :, 4:5]""",
    ),
    ((), [Partial(), Replicate()], "f32[] sum(dp) on mesh(dp=2, tp=4)\n  0-3 + 4-7  []"),
    ((0, 4), P("dp"), "f32[0@dp, 4] on mesh(dp=2, tp=4)\n  0-7  empty"),
]


@pytest.mark.parametrize(("shape", "placements", "picture"), PICTURES)
def test_pictures(shape, placements, picture):
    with shardwise.simulate(8):
        assert draw(tensor(shape, placements)) == dedent(picture)


def test_a_spec_can_be_drawn():
    with shardwise.simulate(8):
        x = tensor((6, 8), P("dp", "tp"))
        assert draw(x._spec) == draw(x)


def test_a_grid_too_wide_is_listed():
    with shardwise.simulate(8):
        picture = draw(tensor((1000,), [Replicate(), InterleavedShard(0, 50)]))
    assert picture.splitlines()[1] == "  0,4  [0:5+20:25+40:45+60:65+80:85+...+980:985]"


def test_one_instance_of_a_submesh_is_drawn():
    with shardwise.simulate(8):
        assert "│  0  │  4  │" in draw(tensor((2,), [Shard(0)], "dp"))


@pytest.mark.parametrize("shape", [(12, 8), (5, 3), (1, 7)])
def test_a_cell_names_exactly_the_ranks_that_hold_it(shape):
    options = [Replicate(), Shard(0), Shard(1)]
    with shardwise.simulate(8):
        for placements in itertools.product(options, repeat=2):
            x = tensor(shape, placements)
            spec = x._spec
            picture = grid(spec)
            held = dict.fromkeys(range(8), 0)
            for row, cells in zip(picture.rows, picture.cells, strict=True):
                for column, ranks in zip(picture.columns, cells, strict=True):
                    for rank in ranks:
                        held[rank] += (row[1] - row[0]) * (column[1] - column[0])
                        runs = spec.layout.runs(spec.mesh_info.coordinates[rank])
                        for piece, dim in ((row, runs[0]), (column, runs[1])):
                            assert any(start <= piece[0] and piece[1] <= stop for start, stop in dim)
            assert held == {rank: shard.numel() for rank, shard in x.shards.items()}
            assert sorted(rank for ranks in holdings(spec).values() for rank in ranks) == list(range(8))


@pytest.mark.parametrize(
    ("ranks", "text"), [((), ""), ((3,), "3"), ((0, 1), "0,1"), ((0, 1, 2), "0-2"), ((0, 2, 4, 5, 6), "0,2,4-6")]
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


def test_visualize_prints_the_drawing_under_its_header(capsys):
    with shardwise.simulate(8):
        x = tensor((6, 8), P("dp", "tp"))
        visualize_sharding(x, header="weights")
        assert capsys.readouterr().out == f"weights\n{draw(x)}\n"


def test_visualize_with_rich(capsys):
    pytest.importorskip("rich")
    with shardwise.simulate(8):
        visualize_sharding(tensor((10,), P(("dp", "tp"))), use_rich=True)
        assert "│  0  │  1  │  2  │  4  │  5  │  6   │" in (out := capsys.readouterr().out)
        assert "empty shards: 3,7" in out
        visualize_sharding(tensor((2, 2, 2), P("dp")), use_rich=True)
        assert "0-3  [0:1, :, :]" in capsys.readouterr().out


def test_visualize_without_rich_falls_back_to_text(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with shardwise.simulate(8):
        x = tensor((6, 8), P("dp", "tp"))
        visualize_sharding(x, use_rich=True)
        assert capsys.readouterr().out == draw(x) + "\n"


def test_only_the_first_rank_of_the_mesh_prints(capsys, monkeypatch):
    with shardwise.simulate(8):
        x = tensor((6, 8), P("dp", "tp"))
        monkeypatch.setattr(x._spec.mesh_info, "coordinate", (0, 1))
        visualize_sharding(x)
        assert capsys.readouterr().out == ""


def test_aliases():
    from shardwise import device_mesh, placement_types

    assert device_mesh.DeviceMesh is shardwise.DeviceMesh
    assert device_mesh.init_device_mesh is shardwise.init_device_mesh
    for name in placement_types.__all__:
        assert getattr(placement_types, name) is getattr(shardwise, name)


def test_module() -> None:
    """Parameters that are alike in numbered modules share a row; every rank holds all of a plain one."""
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 5) for _ in range(2)), "norm": nn.LayerNorm(8)})
        for layer in model["layers"]:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, P("tp")))
        model.register_buffer("table", distribute_tensor(torch.zeros(16, dtype=torch.int8), mesh, P(("dp", "tp"))))
        assert draw(model) == MODULE


MODULE = """\
┌─────────────────┬──────────────────────────────┬──────────┬──────────┐
│ parameter       │ sharding on mesh(dp=2, tp=2) │ global   │ per rank │
├─────────────────┼──────────────────────────────┼──────────┼──────────┤
│ layers.*.weight │ 2 x f32[5@tp, 8]             │    320 B │    192 B │
│ layers.*.bias   │ 2 x plain [5]                │     40 B │     40 B │
│ norm.weight     │ plain [8]                    │     32 B │     32 B │
│ norm.bias       │ plain [8]                    │     32 B │     32 B │
│ table           │ i8[16@(dp, tp)]              │     16 B │      4 B │
│ total           │                              │    440 B │    300 B │
└─────────────────┴──────────────────────────────┴──────────┴──────────┘"""
