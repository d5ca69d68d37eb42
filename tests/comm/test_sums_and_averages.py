"""Partial sums over one axis and averages over another are reduced in one collective."""

import itertools

import pytest
import torch

from shardwise import DTensor, P, Partial, Replicate, plan
from shardwise.testing import assemble, make_dtensor
from tests.worlds import mesh_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
def test_sums_and_averages_are_reduced_together(dtype):
    with mesh_of(2, 3) as mesh:
        for ops, size in itertools.product([("sum", "avg"), ("avg", "sum")], (4, 6)):
            value = torch.randint(0, 2, (size, 3)).to(dtype)
            x = make_dtensor(value, mesh, [Partial(op) for op in ops], seed=0)
            for target in (P(), P(("a", "b")), P(None, ("b", "a"))):
                assert plan(x.spec, x.spec.with_placements(target)).plan.collectives == 1
                found = assemble(x.redistribute(placements=target))
                torch.testing.assert_close(found, value)


def test_sums_and_averages_of_float8():
    with mesh_of(2, 3) as mesh:
        local = torch.full((5,), 1.5).to(torch.float8_e4m3fn)
        x = DTensor.from_local(local, mesh, [Partial(), Partial("avg")])
        for target in (P(), P(("a", "b"))):
            assert torch.equal(assemble(x.redistribute(placements=target)).float(), torch.full((5,), 3.0))


def test_the_average_of_large_halves_does_not_overflow():
    with mesh_of(2, 2) as mesh:
        x = make_dtensor(torch.full((4,), 6e4), mesh, [Replicate(), Replicate()], seed=0).to(torch.float16)
        y = x.redistribute(placements=[Partial("avg"), Replicate()]).redistribute(
            placements=[Partial("avg"), Partial()]
        )
        assert torch.equal(assemble(y.redistribute(placements=[Replicate()] * 2)), torch.full((4,), 6e4).half())


def test_the_plan_of_a_sum_and_an_average():
    with mesh_of(2, 2) as mesh:
        x = make_dtensor(torch.ones(8, 8), mesh, [Partial(), Partial("avg")], seed=0)
        assert str(plan(x.spec, x.spec.with_placements(P()))).splitlines()[1:] == [
            "  1. all-reduce (sum / 2) over (a, b)          384 B   f32[8, 8]"
        ]
