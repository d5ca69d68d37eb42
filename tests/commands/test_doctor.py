"""`shardwise doctor`, on two processes."""

import json

import pytest
import torch

import shardwise
from shardwise.commands import doctor
from shardwise.commands.doctor.measure import AxisCosts, Measured
from shardwise.commands.doctor.ranks import Findings, try_on_processes
from shardwise.commands.doctor.self_test import Check
from shardwise.commands.main import main
from tests.worlds import mesh_of

MEASURED = Measured({"tp": AxisCosts(1e-3, 1e9, 2e-3, 5e8)}, 1e-10)


def test_a_mesh_of_processes_is_tested_and_measured(capsys):
    assert main(["doctor", "--mesh", "tp=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["backends"]["gloo"]
    assert len(found["checks"]) == 5
    assert all(check["ok"] for check in found["checks"])
    assert found["axes"]["tp"]["bandwidth"] > 0
    before = shardwise.cost_model()
    try:
        exec(found["cost_model"], {"shardwise": shardwise})  # what is offered can be pasted
        assert shardwise.cost_model().bandwidth["tp"] > 0
    finally:
        shardwise.set_cost_model(before)


def test_the_offered_model_gives_the_measured_times():
    with mesh_of(4, names=("tp",)) as mesh:
        links = MEASURED.cost_model().links(shardwise.sharding.mesh.mesh_info_of(mesh))
    assert links.ring.seconds((0,), 3, 1e9) == pytest.approx(1.001)
    assert links.p2p.seconds((0,), 3, 1e9) == pytest.approx(2.002)


def test_a_problem_is_exit_code_1(monkeypatch, capsys):
    found = Findings([Check("all-reduce over tp", "rank 1: the sum is 3")], None)
    monkeypatch.setattr(doctor.command, "try_on_processes", lambda *_: found)
    assert main(["doctor", "--mesh", "tp=2"]) == 1
    assert "all-reduce over tp: rank 1: the sum is 3" in capsys.readouterr().out


def test_text(monkeypatch, capsys):
    monkeypatch.setattr(doctor.command, "try_on_processes", lambda *_: Findings([Check("uneven", "")], MEASURED))
    assert main(["doctor", "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert "ok     uneven" in out
    assert "tp            1 ms     954 MiB/s          2 ms       477 MiB/s" in out
    assert 'bandwidth={"tp": 1e+09}' in out


def test_ranks_that_do_not_answer():
    found = try_on_processes({"tp": 2}, "no such device", 1024, seconds=60.0)
    assert found.measured is None
    assert "rank 0" in found.checks[0].problem


def test_too_many_processes_are_refused(capsys):
    assert main(["doctor", "--mesh", "tp=1000"]) == 2
    assert "torchrun" in capsys.readouterr().err
