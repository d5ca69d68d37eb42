"""All ranks must make the same plan. Their processes hash strings differently, so no choice may depend on hashes."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

from shardwise import InterleavedShard, Partial, Replicate, Shard
from shardwise.comm.cost import Links
from shardwise.comm.estimate import estimate
from shardwise.comm.planner import make_plan
from shardwise.errors import CommunicationError, LayoutError
from shardwise.sharding.from_placements import default_order, from_placements

ROOT = Path(__file__).parents[2]
CHOICES = [Shard(0), Shard(1), InterleavedShard(0, 2), Replicate(), *map(Partial, ("sum", "avg", "max", "product"))]


def print_plans(count: int = 300) -> None:
    """Print the plans of random redistributions: equal bandwidths, so that many plans cost the same."""
    draw = random.Random(0)
    for number in itertools.count():
        if not count:
            return
        mesh = draw.choice([(2, 2), (2, 2, 2), (2, 3), (4, 2, 1)])
        shape = draw.choice([(8, 8), (12, 6), (7, 5)])
        try:
            source, target = (_layout(draw, mesh, shape) for _ in range(2))
        except LayoutError:  # an interleaved shard that does not divide
            continue
        links = Links.uniform(draw.choice([0.0, 20e-6]), 0.5e-6, 1e-12, (1e9,) * len(mesh))
        groups = draw.choice([None, frozenset((axis,) for axis in range(len(mesh)))])
        try:
            plan = make_plan(source, target, 4, links, groups)
            steps = [(step.kind, step.axes, step.op, repr(step.after)) for step in plan.steps]
        except CommunicationError as error:
            steps = [str(error)]
        print(number, source, "->", target, steps, estimate(source, target, 4, links))
        count -= 1


def _layout(draw, mesh, shape):
    placements = draw.choices(CHOICES, k=len(mesh))
    return from_placements(mesh, shape, placements, default_order(placements))


def plans_with_hash_seed(seed: int) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    code = "from tests.comm.test_same_plan import print_plans; print_plans()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


def test_plans_do_not_depend_on_hashes():
    first, *others = (plans_with_hash_seed(seed) for seed in (1, 2, 3))
    assert len(first) == 300
    for other in others:
        different = [pair for pair in zip(first, other, strict=True) if pair[0] != pair[1]]
        assert not different, f"{len(different)} plans differ, such as\n" + "\n".join(different[0])
