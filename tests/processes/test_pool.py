"""The harness itself: what fails on a rank fails here, with every rank's traceback, and nothing waits forever."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes.pool import RANKS, Pool, on_processes


@on_processes
def test_every_rank_runs_the_test(tmp_path) -> None:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    assert dist.get_world_size() == RANKS
    assert total.item() == 6
    assert tmp_path.exists()


def one_raises() -> None:
    if dist.get_rank() == 2:
        raise KeyError("only here")
    dist.barrier()


def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(60)


def all_hang() -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (one_raises, ["---- rank 2\nTraceback", "KeyError: 'only here'", "in one_raises"]),
        (one_dies, ["---- rank 1\ndied with exit code 7"]),
        (all_hang, ["no answer; its stack:", "in all_hang"]),
    ],
)
def test_failures_are_told_in_time(body, said, monkeypatch) -> None:
    monkeypatch.setattr("tests.processes.pool.GRACE", 0.5)
    pool = Pool()
    assert pool.run(__name__, "all_well", {}) == ""
    start = time.monotonic()
    told = pool.run(__name__, body.__qualname__, {}, patience=2.0)
    assert time.monotonic() - start < 10
    for text in said:
        assert text in told
    assert pool.processes == []


def all_well() -> None:
    pass
