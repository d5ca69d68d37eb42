"""The report as data: what it says of parameters, memory, communication, and what it warns of."""

import json

import pytest
import torch
from torch import nn

from shardwise import DTensor, P, Partial, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.debug import CommDebugMode, report
from shardwise.dispatch.fallback import GatherWarning
from shardwise.errors import InputError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.world import RankTensor
from tests.debug.test_drawing import Outline
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

AXES = ("dp", "tp")


@torch.library.custom_op("shardwise_reports::no_rule", mutates_args=())
def no_rule(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class MLP(nn.Module):
    def __init__(self, width=16, hidden=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width)) for _ in range(2))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x) * self.scale[0]
        return x


def sharded(mesh, **sizes):
    plan = {
        "layers.*.0": ColwiseParallel(use_local_output=False),
        "layers.*.1": RowwiseParallel(use_local_output=False),
    }
    model = parallelize_module(MLP(**sizes), mesh, plan)
    return distribute_module(model, mesh)


def a_step(mesh):
    model = sharded(mesh)
    x = distribute_tensor(torch.randn(8, 16), mesh, P("dp"))

    def step():
        model(x).square().mean().backward()

    return model, step


def test_a_step_is_reported():
    with mesh_of(2, 2, names=AXES) as mesh:
        model, step = a_step(mesh)
        with CommDebugMode() as comm:
            step()
        model.zero_grad()
        found = report(step)
        assert found.total.count == comm.get_total_counts() > 0
        assert found.total.bytes == comm.get_total_bytes() > 0
        assert [each.name for each in found.tensors] == [*dict(model.named_parameters()), "scale"]
        data = json.loads(found.to_json())
        assert {each["line"]["name"].partition(":")[0] for each in data["communications"]} == {"test_report.py"}
        assert {span["rank"] for span in data["timeline"]} == {0, 1, 2, 3}
        assert {span["track"] for span in data["timeline"]} > {"compute", "tp"}
        assert data["warnings"] == []


def test_memory_is_what_ranks_hold():
    with mesh_of(2, 2, names=AXES) as mesh:
        model = sharded(mesh, width=15, hidden=31)
        found = report(model)
        held = [0] * 4
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for rank in range(4):
                held[rank] += (local.shards[rank] if isinstance(local, RankTensor) else local).nbytes
        assert found.to_dict()["memory"] == {str(rank): nbytes for rank, nbytes in enumerate(held)}
        assert len(set(held)) > 1


def test_memory_on_a_slice_of_a_mesh():
    with mesh_of(2, 2, names=AXES) as mesh:
        found = report(parallelize_module(nn.Linear(4, 8, bias=False), mesh["tp"], ColwiseParallel()))
        assert found.to_dict()["memory"] == {str(rank): 64 for rank in range(4)}


def titles(found, severity=None):
    return [warning.title for warning in found.warnings if severity in (None, warning.severity)]


def test_partial_parameters_and_gradients_are_errors():
    with mesh_of(2, 2, names=AXES) as mesh:
        model = sharded(mesh)
        assert titles(report(model)) == []
        weight = model.layers[0][0].weight
        weight.grad = DTensor.from_local(torch.zeros(16, 16), mesh, [Partial(), Shard(0)])
        assert titles(report(model), "error") == ["the gradient of layers.0.0.weight is not reduced over dp"]
        weight.grad = None
        term = DTensor.from_local(torch.zeros(3), mesh, [Replicate(), Partial()])
        model.scale = term
        assert titles(report(model), "error") == ["scale is not reduced over tp"]


def test_plain_parameters_among_distributed_ones():
    with mesh_of(2, 2, names=AXES) as mesh:
        model = sharded(mesh)
        model.extra = nn.Linear(4, 4)
        assert "2 parameters are not distributed" in titles(report(model), "warning")
    assert titles(report(MLP())) == []


def test_large_replicated_parameters_and_uneven_shards():
    with mesh_of(2, 2, names=AXES) as mesh:
        model = sharded(mesh)
        model.table = nn.Parameter(distribute_tensor(torch.zeros(64, 64), mesh, [Replicate(), Replicate()]))
        assert titles(report(model)) == ["table is replicated over tp"]
        model.table = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Replicate(), Shard(0)]))
        found = report(model)
        assert titles(found) == ["1 tensor with uneven shards"]
        assert "table (f32[5@tp, 3]): ranks hold 24 B to 36 B" in found.warnings[0].text
        del model.table
        layers = [nn.Parameter(distribute_tensor(torch.zeros(32, 32), mesh, [Replicate()] * 2)) for _ in range(2)]
        model.table = nn.ParameterList(layers)
        assert titles(report(model)) == ["table.* is replicated over tp"]
    with mesh_of(4, names=("dp",)) as mesh:  # all replicated: that is data parallelism
        assert titles(report(distribute_module(MLP(), mesh))) == []


def test_unbalanced_ranks():
    with mesh_of(4, names=("tp",)) as mesh:
        model = nn.Module()
        model.table = nn.Parameter(distribute_tensor(torch.zeros(5, 64), mesh, [Shard(0)]))
        assert "ranks hold different amounts of parameters" in titles(report(model), "warning")


def test_an_op_without_a_rule_and_a_costly_line():
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])

        def step():
            with pytest.warns(GatherWarning):
                torch.ops.shardwise_reports.no_rule(x)
            x.sum().full_tensor()

        found = report(step)
    assert any("runs on gathered inputs" in title for title in titles(found, "warning"))
    assert any("of the communication" in title for title in titles(found, "note"))


def test_repeated_layers_are_one_entry():
    with mesh_of(2, 2, names=AXES) as mesh:
        page = report(a_step(mesh)[1]).html()
    assert "MLP.layers.*.1" in page
    assert page.count('class="entry"') < 8


def test_pages_are_well_formed_and_refer_to_nothing(tmp_path):
    with mesh_of(2, 2, names=AXES) as mesh:
        model, step = a_step(mesh)
        pages = [report(step, tmp_path / "page.html", title="<Step> & more").html(), report(model).html()]
        pages += [report(lambda: None).html(), report(nn.Linear(2, 2), None, torch.ones(2)).html()]
    assert (tmp_path / "page.html").read_text() == pages[0]
    for page in pages:
        Outline(page.removeprefix("<!DOCTYPE html>"))
        assert "http://" not in page.replace(
            "http://www.w3.org/2000/svg", ""
        )  # the name of SVG, not an address to load
        assert "https://" not in page
        assert "{{" not in page
    assert "&lt;Step&gt; &amp; more" in pages[0]
    assert "Nothing was communicated" in pages[1]


def test_the_mesh_of_a_step_without_parameters_is_drawn():
    with mesh_of(2, 2, names=AXES) as mesh:
        page = report(lambda: distribute_tensor(torch.ones(4), mesh, P("dp")).sum().full_tensor()).html()
    assert "mesh(dp=2, tp=2)" in page
    assert "No parameter is distributed" in page


def test_a_module_runs_with_arguments():
    with mesh_of(2, 2, names=AXES) as mesh:
        model = sharded(mesh)
        found = report(model, None, distribute_tensor(torch.randn(8, 16), mesh, P("dp")))
        assert found.total.count == 2
        assert isinstance(found.result, DTensor)


def test_other_subjects_are_refused():
    with pytest.raises(InputError, match="report got a subject of type int"):
        report(3)


@on_processes
def test_on_processes(tmp_path):
    from torch.distributed import barrier, get_rank

    from shardwise import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    _, step = a_step(mesh)
    found = report(step, tmp_path / f"{get_rank()}.html")
    assert found.total.count > 0
    assert {span.rank for span in found.step.spans} == {get_rank()}
    barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["0.html"]
    assert "measured on this rank" in (tmp_path / "0.html").read_text()
