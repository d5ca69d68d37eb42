"""Ranks that disagree, raise, wait for each other or die: all ranks stop, and say why.

All divergences are run by `python -m tests.debug.watching.all_divergences`; here a sample of each kind is.
"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from shardwise.debug import unwatched, watch
from shardwise.errors import WatchError, WorldError
from tests.debug.watching.divergences import CASES
from tests.debug.watching.ranks import Ranks
from tests.debug.watching.verdict import complaint, complaint_about_kill
from tests.worlds import fake_group, mesh_of

SAMPLE = [
    "skipped op: mul",
    "skipped op: backward",
    "skipped collective: full_tensor",
    "skipped collective: dist.all_reduce",
    "other shape: rows, full_tensor",
    "other dtype: double, sum",
    "other placement: rows or columns, mul",
    "other order: ops",
    "other order: dist calls",
    "other order: two groups",
    "early return: collectives",
    "raises: index",
    "raises: division",
    "raises: target",
    "raises: hook",
    "reseeded generator: a draw, dropout",
    "uneven from_local: full_tensor, dim 0",
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Ranks]]:
    running = [Ranks()]
    yield running
    running[0].close()


def test_there_are_about_a_hundred_divergences() -> None:
    assert len(CASES) >= 95
    assert {name.partition(":")[0] for name in SAMPLE} == {name.partition(":")[0] for name in CASES}


def test_ranks_that_agree_are_left_alone(ranks) -> None:
    for outcome in ranks[0].run("agree"):
        assert outcome is not None
        assert outcome.error == "", outcome.text


@pytest.mark.parametrize("name", SAMPLE)
def test_a_divergence_stops_all_ranks_and_is_named(name, ranks) -> None:
    outcomes = ranks[0].run("diverge", name)
    if None in outcomes:
        ranks[0].close()
        ranks[0] = Ranks()
    assert complaint(name, outcomes) == "", "\n".join(map(str, outcomes))


@pytest.mark.parametrize(
    ("victim", "where", "store_in_rank_0"),
    [(2, "asleep", False), (2, "collective", False), (0, "asleep", True), (0, "collective", True)],
)
def test_a_rank_that_is_killed_is_named(victim, where, store_in_rank_0) -> None:
    ranks = Ranks(store_in_rank_0=store_in_rank_0)
    try:
        outcomes = ranks.run("die", victim, where)
        assert ranks.processes[victim].exitcode == -signal.SIGKILL
        assert complaint_about_kill(victim, outcomes) == ""
    finally:
        ranks.close()


PROGRAM = """
import os, sys, torch, torch.distributed as dist
from shardwise import Shard, distribute_tensor, init_device_mesh
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
if rank == 1 and sys.argv[3] == "raise":
    raise ValueError("a bad batch")
if rank == 1 and sys.argv[3] == "end":
    sys.exit(0)
x.sum().full_tensor()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["fine", "raise", "end"])
def test_the_environment_switches_it_on(how, tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    root = Path(shardwise.__file__).parents[1]
    env = os.environ | {"SHARDWISE_WATCH": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), how],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=60)[1] for process in started]
    if how == "fine":
        assert [process.returncode for process in started] == [0, 0], said
    elif how == "raise":
        assert "WatchError: rank 1 raised ValueError: a bad batch" in said[0]
        assert "ValueError: a bad batch" in said[1]
    else:
        assert "rank 1: leave the watch, or end the program" in said[0]
        assert "program.py:12   x.sum().full_tensor()" in said[0]


def test_where_ranks_cannot_disagree_it_does_nothing() -> None:
    with mesh_of(2) as mesh, watch(), unwatched():
        assert shardwise.ones(4, device_mesh=mesh, placements=[shardwise.Shard(0)]).sum().item() == 4
    with fake_group(4), watch():
        pass
    with pytest.raises(WorldError, match="needs a process group"):
        watch()


def test_the_error_says_who() -> None:
    error = WatchError("what", "fix", (3,))
    assert (error.problem, error.fix, error.ranks, str(error)) == ("what", "fix", (3,), "what\n  fix")
