"""Threads that work on tensors of one simulated world at the same time."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.random import is_exact
from shardwise.world import RankTensor, map_ranks, simulate

THREADS, ROUNDS = 8, 20


@pytest.fixture(autouse=True)
def switch_often():
    """Let the interpreter switch between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], object]) -> list[object]:
    """Run work(0), ..., work(7) at once, each in a thread of its own, and return the results."""
    start = Barrier(THREADS)

    def run(index: int) -> object:
        start.wait()
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def test_ops_on_rank_tensors() -> None:
    with simulate(4):
        shared = map_ranks(lambda rank: torch.full((3 + rank % 2, 4), float(rank)))

        def work(index: int) -> None:
            for step in range(ROUNDS):
                own = RankTensor([torch.full((3 + rank % 2, 4), float(index)) for rank in range(4)])
                y = (shared + own * step).relu().t().contiguous()
                y.add_(1)
                for rank, shard in enumerate(y.shards):
                    assert torch.equal(shard, torch.full((4, 3 + rank % 2), rank + index * step + 1.0))

        in_threads(work)


def test_backward_on_rank_tensors() -> None:
    with simulate(2):

        def work(index: int) -> None:
            for _ in range(ROUNDS):
                x = RankTensor([torch.full((2 + rank, 3), float(index)) for rank in range(2)], requires_grad=True)
                x.mul(x).mean().backward()
                assert isinstance(x.grad, RankTensor)
                for shard in x.grad.shards:
                    torch.testing.assert_close(shard, torch.full_like(shard, 2 * index / shard.numel()))

        in_threads(work)


def test_collectives() -> None:
    with simulate(4):
        name = torch.distributed.group.WORLD.group_name

        def work(index: int) -> None:
            for step in range(ROUNDS):
                x = RankTensor([torch.full((2,), float(rank * index + step)) for rank in range(4)])
                y = torch.ops._c10d_functional.all_reduce(x, "sum", name)
                assert y.tolist() == [6.0 * index + 4 * step] * 2

        in_threads(work)


def test_random_ops_draw_the_same_numbers_on_all_ranks() -> None:
    with simulate(8):
        x = map_ranks(lambda rank: torch.zeros(64))

        def work(index: int) -> None:
            for _ in range(ROUNDS):
                drawn = torch.rand_like(x)
                assert all(torch.equal(shard, drawn.shards[0]) for shard in drawn.shards)

        in_threads(work)


def test_ops_on_distributed_tensors() -> None:
    """In new worlds, so that threads meet where meshes are adopted, specs interned and calls planned."""
    for rows in range(8, 20):
        x, w = torch.arange(6.0 * rows).view(rows, 6), torch.arange(24.0).view(6, 4)
        want = (x @ w).relu().sum(0)
        with simulate(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

            def work(index: int, mesh=mesh, x=x, w=w, want=want) -> None:
                for step in range(4):
                    left = distribute_tensor(x, mesh, [Shard(0), Replicate()] if step % 2 else [Shard(1), Shard(0)])
                    right = distribute_tensor(w, mesh, [Replicate(), Shard(index % 2)])
                    assert torch.equal((left @ right).relu().sum(0).full_tensor(), want)

            in_threads(work)


def test_random_numbers_of_distributed_tensors_are_drawn_once_for_all_ranks() -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.zeros(64), mesh, [Replicate()])

        def work(index: int) -> None:
            for _ in range(ROUNDS // 2):
                local = torch.rand_like(x).to_local()
                assert isinstance(local, RankTensor)
                assert all(torch.equal(shard, local.shards[0]) for shard in local.shards)

        in_threads(work)


def test_exact_holds_for_the_thread_that_asked_for_it() -> None:
    both_inside = Barrier(THREADS)

    def work(index: int) -> bool:
        with shardwise.random.exact(index % 2 == 0):
            both_inside.wait()
            inside = is_exact()
            both_inside.wait()
        assert not is_exact()
        return inside

    assert in_threads(work) == [index % 2 == 0 for index in range(THREADS)]
    assert not is_exact()
