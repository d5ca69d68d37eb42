"""Parameters that stages of a pipeline share equal those of one device, and stay equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import P, init_device_mesh
from shardwise.fsdp import fully_shard
from shardwise.pipeline import Pipeline
from tests.pipeline.models import batches, check, full, loss_fn, pipeline_of, stages_of
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


@pytest.mark.parametrize("stages", [2, 4])
def test_an_embedding_and_a_head_that_are_sharded_differently(stages):
    with mesh_of(2, 2, 2, names=("pp", "dp", "tp")) as mesh:
        model = pipeline_of(mesh, stages, tied=True)
        check(model, stages, steps=3, tied=True)
        words, head = model.get_submodule("0").words.weight, model.get_submodule(str(stages - 1)).head.weight
        assert words.placements != head.placements
        assert torch.equal(full(words), full(head))


@on_processes
def test_on_processes():
    for stages in (2, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        check(pipeline_of(mesh, stages, tied=True), stages, steps=2, tied=True)


def test_under_fully_shard():
    with mesh_of(2, 2, names=("pp", "dp")) as mesh:
        model = Pipeline(
            stages_of(2, tied=True),
            mesh,
            "pp",
            lambda stage, submesh: fully_shard(stage, mesh=submesh),
            loss_fn=loss_fn,
            microbatches=2,
            placements=P("dp"),
        )
        check(model, 2, steps=2, tied=True)


def test_stages_of_one_rank_share_too():
    with mesh_of(1, 2, names=("pp", "tp")) as mesh:
        check(pipeline_of(mesh, 2, tied=True), 2, steps=2, tied=True)


def test_local_tensors():
    with mesh_of(2, 1, names=("pp", "tp")) as mesh:
        model = Pipeline(stages_of(2, tied=True), mesh, "pp", loss_fn=loss_fn, microbatches=2)
        check(model, 2, steps=2, tied=True)


def test_gradients_of_several_steps_add_up():
    (words,) = batches(1)
    with mesh_of(2, 2, names=("pp", "tp")) as mesh:
        model = pipeline_of(mesh, tied=True)
        model.step(words[:, :-1], target=words[:, 1:])
        once = full(model.get_submodule("0").words.weight.grad)
        model.step(words[:, :-1], target=words[:, 1:])
        for parameter in (model.get_submodule("0").words.weight, model.get_submodule("1").head.weight):
            torch.testing.assert_close(full(parameter.grad), 2 * once)
        alone = nn.Sequential(*stages_of(2, tied=True))
        loss_fn(alone(words[:, :-1]), words[:, 1:]).backward()
        torch.testing.assert_close(once, alone[0].words.weight.grad)
