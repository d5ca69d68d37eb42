"""`shardwise draw SPEC --mesh AXES`: which ranks hold which shards."""

from __future__ import annotations

import argparse
import json

from ..debug.holdings import holdings, members
from ..debug.picture import draw
from ..sharding.spec_parse import parse_spec
from .command import Command
from .mesh import add_mesh_argument, simulated_mesh

_EXAMPLES = """
shardwise draw "f32[8@dp, 16@tp]" --mesh dp=2,tp=4
shardwise draw "f32[(3 8@tp)]" --mesh tp=2
shardwise draw "f32[8, 16@tp] sum(dp)" --mesh dp=2,tp=4 --json
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", help='a tensor as it is printed, such as "f32[8@dp, 16@tp]"')
    add_mesh_argument(parser, required=True)


def _run(given: argparse.Namespace) -> int:
    with simulated_mesh(given.mesh, "cpu") as mesh:
        spec = parse_spec(given.spec, mesh)
        if not given.json:
            print(draw(spec))
            return 0
        coordinates = members(spec)
        names = spec.mesh_info.names
        shards = [
            {
                "ranks": list(ranks),
                "index": [list(map(list, runs)) for runs in shard],
                "shape": list(spec.local_shape(coordinates[ranks[0]])),
            }
            for shard, ranks in holdings(spec).items()
        ]
        mesh_sizes = dict(zip(names, spec.mesh_info.sizes, strict=True))
        print(json.dumps({"spec": repr(spec), "mesh": mesh_sizes, "shards": shards}, indent=2))
    return 0


COMMAND = Command("draw which ranks hold which shards of a tensor", _EXAMPLES, _add_arguments, _run)
