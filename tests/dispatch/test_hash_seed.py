"""Every rank must choose alike, so no choice may depend on the order of a set of strings, which differs by process."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANS = int(os.environ.get("SHARDWISE_PLANS", "500"))  # a few seconds; thousands take a minute

PROGRAM = """
import itertools
from shardwise.comm.cost import Links
from shardwise.comm.estimate import estimate
from shardwise.dispatch.decision import Operand, Result
from shardwise.dispatch.propagate import ShardingPropagator
from shardwise.notation import bind, parse
from shardwise.sharding.layout import Factor, Layout

mesh_sizes = (2, 4, 3)
links = Links.uniform(latency=1e-5, peer_latency=1e-6, pack=1e-6, bandwidth=(1e9, 2e9, 3e9))

partials = [(), ((0, "sum"),), ((0, "max"), (1, "sum")), ((0, "sum"), (1, "max"), (2, "min"))]
cuts = [((), ()), ((0,), (1,)), ((2, 1), ()), ((), (0, 1, 2))]
layouts = []
for axes, partial in itertools.product(cuts, partials):
    used = {axis for dim in axes for axis in dim} & {axis for axis, _ in partial}
    if not used:
        layouts.append(Layout.make(mesh_sizes, [(Factor(24, dim),) for dim in axes], partial))
for one, other in itertools.product(layouts, repeat=2):
    print(one, other, estimate(one, other, 4, links))
for text in ("a? b?, a? b? -> a b ; linear 0+1 ; monotone 0 | 1 | 0+1", "a k, k b -> a b ; linear 0 | 1"):
    bound = bind(parse(text), [(24, 24), (24, 24)])
    for one, other in itertools.product(layouts, repeat=2):
        operands = [Operand(i, bound.inputs[i], layout, 4) for i, layout in enumerate((one, other))]
        results = [Result(0, bound.outputs[0], 4)]
        print(ShardingPropagator(bound, operands, results, mesh_sizes, links, {}).choose())
"""


def test_choices_and_prices_do_not_depend_on_the_hash_seed() -> None:
    printed = []
    for seed in ("0", "6", "7"):  # under which {"sum", "max", "min"} has three orders
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert len(printed[0].splitlines()) > 100
    assert all(text == printed[0] for text in printed)


def test_plans_of_random_ops_do_not_depend_on_the_hash_seed() -> None:
    """The same ops, planned in 8 processes: the same choices, and the same collectives in the same order.

    Half of the processes plan them in the opposite order, so that what was planned before does not matter either.
    """

    def printed(seed: int) -> list[str]:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.dispatch.random_plans", str(PLANS)]
        command += ["backwards"] if seed % 2 else []
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with ThreadPoolExecutor(2) as pool:
        first, *others = pool.map(printed, range(8))
    assert len(first) > PLANS
    assert sum("no rule" in line or "Error" in line for line in first) < len(first) / 10
    assert sum("all-reduce" in line or "reduce-scatter" in line for line in first) > len(first) / 4
    for other in others:
        assert next((pair for pair in zip(first, other, strict=True) if pair[0] != pair[1]), None) is None
