"""The private names behind `_torch.c10d`: PyTorch's tables of process groups, its fake backend and its work handles."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise._torch import c10d
from shardwise._torch.c10d import SavedProcessGroups, finished_work, group_of_members, start_fake_group
from tests.processes.pool import on_processes

functional = torch.ops._c10d_functional


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


def test_the_tables_of_process_groups_are_all_known(group) -> None:
    world = distributed_c10d._world
    names = [name for name in dir(world) if name.startswith(("pg_", "tags_"))]
    assert {name for name in names if isinstance(getattr(world, name), dict)} == set(c10d._TABLES)


def test_saved_groups_are_out_of_sight_until_restored(group) -> None:
    default, name = dist.group.WORLD, group.group_name
    saved = SavedProcessGroups()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    saved.restore()
    assert dist.group.WORLD is default
    assert dist.get_backend() == "gloo"
    reduced = functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", name))
    assert reduced.tolist() == [1, 1]


def test_destroying_the_default_group_leaves_saved_groups_alone(group) -> None:
    saved = SavedProcessGroups()
    start_fake_group(4)
    dist.destroy_process_group()
    with pytest.raises((RuntimeError, LookupError, ValueError)):
        distributed_c10d._resolve_process_group(group.group_name)
    saved.register_names()
    assert distributed_c10d._resolve_process_group(group.group_name) is group
    saved.restore()
    reduced = functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", group.group_name))
    assert reduced.tolist() == [1, 1]


def test_groups_made_since_are_forgotten_and_their_names_never_used_again() -> None:
    names = []
    for _ in range(2):
        saved = SavedProcessGroups()
        names += [start_fake_group(4).group_name, dist.new_group([0, 1]).group_name]
        saved.restore()
        assert not dist.is_initialized()
    assert len(set(names)) == 4
    for name in names:
        with pytest.raises((RuntimeError, LookupError, ValueError)):
            distributed_c10d._resolve_process_group(name)


def test_a_fake_group_has_the_size_asked_for_and_moves_nothing() -> None:
    hook = sys.excepthook
    saved = SavedProcessGroups()
    try:
        group = start_fake_group(8)
        assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (8, 0, "fake")
        assert dist.group.WORLD is group
        assert sys.excepthook is hook
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1]
    finally:
        saved.restore()


def test_a_group_is_made_by_its_members_alone(group) -> None:
    made = group_of_members([0], "a name of our own")
    assert made.group_name == "a name of our own"
    assert dist.get_process_group_ranks(made) == [0]
    assert dist.get_backend(made) == "gloo"
    reduced = functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", "a name of our own"))
    assert reduced.tolist() == [1, 1]


@on_processes
def test_members_agree_on_a_group_whatever_other_groups_they_have() -> None:
    for count in range(1 + dist.get_rank()):  # names by the number of groups would differ
        group_of_members([dist.get_rank()], f"{dist.get_rank()} alone, {count}")
    if dist.get_rank() != 1:
        made = group_of_members([3, 0, 2], "three of four")
        assert dist.get_process_group_ranks(made) == [3, 0, 2]
        assert made.rank() == [3, 0, 2].index(dist.get_rank())
        mine = torch.tensor([float(dist.get_rank())])
        assert functional.wait_tensor(functional.all_reduce(mine, "sum", "three of four")).item() == 5


def test_finished_work_can_be_waited_for() -> None:
    work = dist.Work.unbox(finished_work())
    assert work.wait()
