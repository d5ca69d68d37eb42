"""The program of an erased step: readable, and as much as needed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import P, Shard, distribute_tensor, erase
from tests.erasing.steps import batch, model_on
from tests.worlds import Recorder, lone_rank, mesh_of


def two_layers(x, w, v):
    return F.relu(x @ w) @ v


def operands(mesh, axis):
    torch.manual_seed(0)
    w = distribute_tensor(torch.randn(8, 4), mesh, P(None, axis))
    return torch.randn(2, 8), w, distribute_tensor(torch.randn(4, 3), mesh, P(axis))


def test_the_text_names_shapes_axes_and_lines():
    with lone_rank() as mesh:
        x, w, v = operands(mesh, "tp")
        step = erase(lambda x: two_layers(x, w, v).redistribute(placements=P()))
        step(distribute_tensor(x, mesh, P()))
        text = step.code
        assert text.startswith("def step(x, w, v):")
        assert "mm_1 = mm(x, w)" in text
        assert "# f32[2, 1]" in text
        assert "over tp" in text
        assert "test_program.py" in text
        assert "return F.relu(x @ w) @ v" in text
        assert "DTensor" not in text
        assert len(text.splitlines()) < 20


def test_explain_counts_ops_collectives_and_bytes():
    with lone_rank() as mesh:
        x, w, v = operands(mesh, "tp")
        step = erase(lambda x: two_layers(x, w, v).redistribute(placements=P()))
        step(distribute_tensor(x, mesh, P()))
        text = step.explain()
        assert "all_reduce over tp: 1, 24 B" in text
        assert "guards" in text


def test_gradients_are_reduced_together_and_waited_for_late():
    def step_of(mesh, **options):
        model = model_on(mesh)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        return erase(step, **options)

    with mesh_of(2, 2) as mesh:
        x = batch(mesh, 0)
        joined, plain = step_of(mesh), step_of(mesh, passes=())
        names = []
        for step in (joined, plain):
            step(x)
            with Recorder() as recorder:
                step(x)
            names.append([name for name in recorder.names if name != "wait_tensor"])
        assert names[0].count("all_reduce_coalesced") >= 1
        assert len(names[0]) < len(names[1]) - 6
        assert "all_reduce_coalesced" not in names[1]


def test_what_is_computed_twice_is_computed_once():
    with lone_rank() as mesh:
        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        step = erase(lambda x: x.exp() + x.exp())
        step(x)
        assert step.code.count("exp(x)") == 1
        apart = erase(lambda x: x.exp() + x.exp(), passes=())
        apart(x)
        assert apart.code.count("exp(x)") == 2


def test_a_write_between_two_ops_keeps_both():
    with mesh_of(4) as mesh:

        def step(x):
            y = x.clone()
            a = y.exp()
            y.add_(1)
            return a, y.exp(), y

        erased = erase(step)
        for seed in range(3):
            torch.manual_seed(seed)
            x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
            for one, other in zip(erased(x), step(x), strict=True):
                assert torch.equal(one.full_tensor(), other.full_tensor())


def test_intermediate_results_are_let_go():
    with lone_rank() as mesh:
        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        step = erase(lambda x: x.exp().sin().cos())
        step(x)
        assert "del exp_1" in step.code
        assert "del sin_1" in step.code


def test_a_replay_makes_no_distributed_tensors_but_its_results():
    with lone_rank() as mesh:
        torch.manual_seed(0)
        linear = nn.Linear(4, 4)
        for name, p in list(linear.named_parameters()):
            linear.register_parameter(name, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
        x = distribute_tensor(torch.randn(8, 4), mesh, P())
        step = erase(lambda x: linear(linear(x)))
        step(x)
        called = []
        dispatch = type(x).__torch_dispatch__

        def counting(*args):
            called.append(args)
            return dispatch(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(x), "__torch_dispatch__", staticmethod(counting))
            step(x)
        assert not called
        assert type(x).__torch_dispatch__ is dispatch
