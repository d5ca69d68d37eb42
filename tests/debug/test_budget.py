"""`budget` raises an error with an explanation if a block communicates more than it may, in both worlds."""

import pytest
import torch

from shardwise import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.debug import CommDebugMode, budget
from shardwise.errors import BudgetError, InputError
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


def program(mesh: DeviceMesh) -> None:
    """Two all-gathers over tp of 64 and 128 bytes, an all-reduce over dp of 4."""
    x = distribute_tensor(torch.ones(8, 4), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    x.redistribute(placements=[Replicate(), Replicate()])
    y = distribute_tensor(torch.ones(16, 4), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    y.redistribute(placements=[Replicate(), Replicate()])
    z = distribute_tensor(torch.ones(16, 4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    z.sum().full_tensor()


ENOUGH = [
    {"all_gather": 2, "all_reduce": 1},
    {"all_gather_into_tensor": 2},
    {"total": 3},
    {"bytes": "1 KiB"},
    {"bytes": 192, "over": "tp"},
    {"total": 1, "over": "dp"},
    {"all_reduce": 0, "over": "tp"},
    {"total": 3, "over": ("dp", "tp")},
    {"reduce_scatter": 0, "all_to_all": 0, "broadcast": 0},
]
TOO_LITTLE = [
    ({"all_gather": 1}, "2 all_gather where 1 is allowed"),
    ({"all_gather_into_tensor": 1}, "2 all_gather_into_tensor where 1 is allowed"),
    ({}, "3 collectives where 0 are allowed"),
    ({"total": 2}, "3 collectives where 2 are allowed"),
    ({"bytes": "100 B", "over": "tp"}, "192 B received over tp where 100 B are allowed"),
    ({"total": 0, "over": "dp"}, "1 collectives over dp where 0 are allowed"),
    ({"all_reduce": 0, "all_gather": 0}, "1 all_reduce where 0 are allowed; 2 all_gather where 0 are allowed"),
]


def check(mesh: DeviceMesh) -> None:
    for limits in ENOUGH:
        with budget(**limits):
            program(mesh)
    for limits, problem in TOO_LITTLE:
        with pytest.raises(BudgetError) as raised, budget(**limits):
            program(mesh)
        assert raised.value.problem == problem
    assert "x.redistribute(placements=[Replicate(), Replicate()])" in str(raised.value)


def test_limits() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        check(mesh)


@on_processes
def test_limits_on_processes() -> None:
    check(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def test_names_are_those_of_comm_debug_mode() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        with CommDebugMode() as comm:
            program(mesh)
        counts = {str(op).rpartition(".")[2]: number for op, number in comm.get_comm_counts().items()}
        with budget(**counts):
            program(mesh)
        for name in counts:
            with pytest.raises(BudgetError, match=name), budget(**{**counts, name: counts[name] - 1}):
                program(mesh)


def test_only_what_counts_is_explained() -> None:
    limit = budget(total=0, over="dp")
    with mesh_of(2, 2, names=("dp", "tp")) as mesh, pytest.raises(BudgetError) as raised, limit as spent:
        program(mesh)
    assert "full_tensor" in str(raised.value)
    assert "all-gather" not in str(raised.value)
    assert len(spent.explanation.communications) == 3
    assert isinstance(raised.value, AssertionError)


def test_backward_passes_count() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.ones(8, 4), mesh, [Replicate()]).requires_grad_()
        with pytest.raises(BudgetError, match="1 all_gather where 0"), budget(all_gather=0):
            x.redistribute(placements=[Shard(0)]).pow(2).sum().backward()


def test_an_error_in_the_block_is_not_hidden() -> None:
    def fails(mesh: DeviceMesh) -> None:
        program(mesh)
        raise KeyError

    with mesh_of(2, 2, names=("dp", "tp")) as mesh, pytest.raises(KeyError), budget():
        fails(mesh)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"all_gathers": 2}, "budget got all_gathers=, which is no collective: use one of all_gather, "),
        ({"bytes": "3 MeB"}, "budget got the size '3 MeB'"),
        ({"bytes": -1}, "budget got the size -1"),
    ],
)
def test_wrong_limits(limits, problem) -> None:
    with pytest.raises(InputError) as raised:
        budget(**limits)
    assert problem in str(raised.value)


def test_an_axis_that_no_mesh_has() -> None:
    problem = "budget got over='cp', which is no mesh axis: use dp, tp"
    with mesh_of(2, 2, names=("dp", "tp")) as mesh, pytest.raises(InputError, match=problem), budget(over="cp"):
        program(mesh)
