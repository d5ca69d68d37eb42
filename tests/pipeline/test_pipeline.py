"""A pipeline equals one device: in the simulated world and on processes, by each schedule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from shardwise import init_device_mesh, simulate
from shardwise.debug import CommDebugMode
from shardwise.errors import ShardwiseError
from shardwise.pipeline import Action, schedule, stage_meshes
from tests.pipeline.models import batches, check, check_local, pipeline_of
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

AXES = ("pp", "dp", "tp")


@pytest.mark.parametrize(("kind", "stages"), [("gpipe", 2), ("1f1b", 2), ("1f1b", 4)])
def test_simulated(kind, stages):
    with mesh_of(2, 2, 2, names=AXES) as mesh:
        model = pipeline_of(mesh, stages, schedule=kind)
        check(model, stages, steps=2)
        first = model.get_submodule("0").up.weight
        assert sorted(first.shards) == [0, 1, 2, 3]
        assert sorted(model.get_submodule("1").up.weight.shards) == [4, 5, 6, 7]


@pytest.mark.parametrize(("kind", "stages"), [("gpipe", 2), ("1f1b", 2), ("1f1b", 4)])
@on_processes
def test_on_processes(kind, stages):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = pipeline_of(mesh, stages, schedule=kind)
    check(model, stages, steps=2)
    own = mesh.get_local_rank("pp")
    assert sorted(model._modules) == [str(index) for index in range(own, stages, 2)]


def test_local_tensors_simulated():
    with mesh_of(2, 2, names=("pp", "tp")) as mesh:
        check_local(mesh)


@on_processes
def test_local_tensors_on_processes():
    check_local(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))


def test_evaluation_and_errors():
    with mesh_of(2, 2, names=("pp", "tp")) as mesh:
        model = pipeline_of(mesh)
        words = batches(1)[0]
        loss = model.evaluate(words[:, :-1], target=words[:, 1:])
        torch.testing.assert_close(loss, model.step(words[:, :-1], target=words[:, 1:]))
        with pytest.raises(ShardwiseError, match=r"use pipeline.step"):
            model(words)
        with pytest.raises(ShardwiseError, match=r"of shape \[2, 5\] as a batch of 3 microbatches"):
            model.step(words[:2, :-1], target=words[:2, 1:])
        with pytest.raises(ShardwiseError, match="use one of gpipe, 1f1b"):
            schedule("zigzag", ranks=2, stages=2, microbatches=2)
    with simulate(4), pytest.raises(ShardwiseError, match="no other axes"):
        stage_meshes(init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_schedules(kind, ranks, chunks):
    for microbatches in range(1, 10):
        stages = ranks * chunks
        order = schedule(kind, ranks=ranks, stages=stages, microbatches=microbatches)
        place = {action: index for index, action in enumerate(order)}
        assert len(place) == len(order) == 2 * stages * microbatches
        for backward, stage, microbatch in order:
            here = place[Action(backward, stage, microbatch)]
            if not backward and stage:
                assert place[Action(False, stage - 1, microbatch)] < here
            if backward:
                assert place[Action(False, stage, microbatch)] < here
            if backward and stage < stages - 1:
                assert place[Action(True, stage + 1, microbatch)] < here
        if kind == "1f1b" and chunks == 1:  # stage s holds the activations of at most ranks - s microbatches
            held = [0] * stages
            for backward, stage, _ in order:
                held[stage] += -1 if backward else 1
                assert held[stage] <= stages - stage


# ---- counted communication -----------------------------------------------------------------------------------------


def messages_of_second_step(mesh):
    """Kind, axis, whether in the backward pass, and bytes, of the messages between stages."""
    model, (words,) = pipeline_of(mesh), batches(1)
    model.step(words[:, :-1], target=words[:, 1:])
    with CommDebugMode() as counted:
        model.step(words[:, :-1], target=words[:, 1:])
    sent = counted.get_comm_counts()[torch.ops.c10d.send]
    received = counted.get_comm_counts()[torch.ops.c10d.recv_]
    messages = [each for each in counted.collectives if each.kind in ("send", "receive")]
    assert (sent, received) == tuple(sum(each.kind == kind for each in messages) for kind in ("send", "receive"))
    table = counted.generate_comm_debug_tracing_table(noise_level=0)
    assert "send over pp" in table, table
    return Counter((each.kind, each.over, each.moment.backward) for each in messages), sum(
        each.received for each in messages
    )


def test_messages_are_counted_simulated():
    with mesh_of(2, 2, names=("pp", "tp")) as mesh:
        found, nbytes = messages_of_second_step(mesh)
    assert found == {(kind, "pp", back): 3 for kind in ("send", "receive") for back in (False, True)}
    assert nbytes == 2 * 7 * 5 * 8 * 4  # rows, words, width, bytes of a number; forward and backward


@on_processes
def test_messages_are_counted_on_processes():
    found, nbytes = messages_of_second_step(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))
    last = dist.get_rank() >= 2
    assert found == {("send", "pp", last): 3, ("receive", "pp", not last): 3}
    assert nbytes == 7 * 5 * 8 * 4
