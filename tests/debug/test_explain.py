"""`explain` returns line, module, op, operand, reason, price, alternatives and edit of every collective."""

import inspect
import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import (
    CostModel,
    DTensor,
    Replicate,
    Shard,
    accumulate_gradients,
    bucket_gradients,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    local_map,
    using_cost_model,
)
from shardwise.debug import CommDebugMode, Explanation, explain
from shardwise.debug.explaining.records import CAUSES
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return self.down(hidden)


def lines_of(function) -> dict[str, int]:
    """The numbers of the lines of a function that end in a comment, by the comment."""
    lines, first = inspect.getsourcelines(function)
    return {text.rpartition("# ")[2].strip(): first + i for i, text in enumerate(lines) if "# " in text}


def causes(e: Explanation) -> list[tuple[str, str, str]]:
    return [(c.phase, c.kind, c.cause) for c in e.communications]


def conflicting_product(mesh):
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(16, 12), mesh, [Shard(1)]).requires_grad_()
    return x, w


def product_and_softmax(x, w):
    y = x @ w  # product
    return y.softmax(1)  # softmax


# ---- ops -------------------------------------------------------------------------------------------------------------


def test_an_operand_is_explained_with_prices_alternatives_and_edit() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        with explain() as e:
            product_and_softmax(x, w)
    moved, exchanged = e.communications
    assert (moved.kind, moved.over, moved.bytes, moved.op, moved.operand) == (
        "all-gather",
        ("tp",),
        384,
        "aten.mm",
        "x",
    )
    assert (moved.before, moved.after) == ("f32[8@tp, 16]", "f32[8, 16]")
    assert moved.reason.startswith("mm needs m unsharded on tp; moving x costs 384 B, moving w 576 B")
    assert moved.rule == "m=8 k=16 n=12: m k, k n -> m n ; linear 0 | 1"
    assert moved.chosen.axes == (("tp", "shards n"),)
    assert [choice.axes[0][1] for choice in moved.rejected] == ["shards m", "is not used", "shards k"]
    assert moved.rejected[0].moves[0].operand == "w"
    assert moved.rejected[0].bytes == 576
    assert moved.chosen.seconds <= min(choice.seconds for choice in moved.rejected)
    assert moved.edit == "x = x.redistribute(placements=[Replicate()])  # once, for all that read it"
    assert (exchanged.cause, exchanged.op) == ("kernel", "aten._softmax")


def test_the_edit_avoids_the_communication_forward_and_backward() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        with explain() as before:
            (x @ w).pow(2).sum().backward()
        assert causes(before) == [("forward", "all-gather", "operand"), ("backward", "all-gather", "operand")]
        assert {c.edit for c in before.communications} == {before.communications[0].edit}
        names = {"x": x, "Replicate": Replicate}
        exec(before.communications[0].edit, names)
        with explain() as after:
            (names["x"] @ w).pow(2).sum().backward()
        assert after.communications == []


def test_an_edit_of_a_weight_is_where_it_is_made() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.randn(64, 16), mesh, [Shard(0)])
        model = nn.Linear(16, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
        with explain() as e:
            model(x)
    (one,) = e.communications
    assert (one.operand, one.module) == ("Linear.weight", "Linear")
    assert one.edit == "weight = distribute_tensor(weight, mesh, [Replicate()])  # where Linear.weight is made"


def test_lines_of_the_backward_pass_are_those_of_the_forward_pass() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        with explain() as e:
            product_and_softmax(x, w).pow(2).sum().backward()
    numbers = lines_of(product_and_softmax)
    found = [(c.phase, c.line.number) for c in e.communications]
    forward, backward = ("forward", numbers["product"]), ("backward", numbers["softmax"])
    assert found == [forward, ("forward", numbers["softmax"]), backward, ("backward", numbers["product"])]
    assert all(c.line.path == __file__ for c in e.communications)
    assert e.communications[0].line.text == "y = x @ w  # product"


def test_warm_calls_are_explained_alike() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        found = []
        for _ in range(3):
            x, w = conflicting_product(mesh)
            with explain() as e:
                product_and_softmax(x, w).sum().backward()
            found.append(e.to_dict())
            product_and_softmax(*conflicting_product(mesh))
    assert found[0] == found[1] == found[2]
    assert found[0]["communications"][0]["rejected"]


def test_prices_are_those_of_the_cost_model() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        seconds = []
        for rate in (1e9, 1e3):
            x, w = conflicting_product(mesh)
            with using_cost_model(CostModel(latency=0.0, peer_latency=0.0, bandwidth={"tp": rate})), explain() as e:
                x @ w
            seconds.append(e.communications[0].seconds)
    assert seconds == pytest.approx([384 / 1e9, 384 / 1e3])


def test_an_op_that_runs_on_gathered_inputs() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.randn(8).abs(), mesh, [Shard(0)])
        with explain() as e:
            torch.masked_select(x, x > 0)
    assert {c.cause for c in e.communications} <= {"gathered inputs", "operand", "kernel"}
    assert e.communications


def write_through_a_view(x, w):
    y = x * 1
    y[0:4].mul_(2)  # write
    return y @ w  # product


def test_writes_to_views_have_lines_in_both_passes() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        x.requires_grad_()
        with explain() as e:
            write_through_a_view(x, w).sum().backward()
    numbers = lines_of(write_through_a_view)
    assert {c.line.number for c in e.communications if c.phase == "backward"} <= set(numbers.values())
    assert {c.line.number for c in e.communications if c.phase == "forward"} == {numbers["write"], numbers["product"]}


class TwiceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.redistribute(placements=[Replicate()])


def own_function(x):
    return TwiceInBackward.apply(x)  # applied


def test_functions_of_the_user_have_the_line_that_applied_them() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]).requires_grad_()
        with explain() as e:
            y = own_function(x)
            (y * x.detach()).sum().backward()
    one = e.communications[0]
    assert (one.phase, one.cause, one.line.number) == ("backward", "redistribute", lines_of(own_function)["applied"])


def recomputed(x, w):
    return ((x * 1) @ w).relu()  # recomputed


def test_recomputed_code_has_its_own_line() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        with explain() as e:
            checkpoint(recomputed, x, w, use_reentrant=False).sum().backward()
    number = lines_of(recomputed)["recomputed"]
    assert [(c.phase, c.line.number) for c in e.communications][:2] == [("forward", number), ("recomputing", number)]


def test_second_derivatives_have_the_line_of_the_first_forward_pass() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        x.requires_grad_()
        with explain() as e:
            product = (x @ w).pow(2).sum()
            (grad,) = torch.autograd.grad(product, x, create_graph=True)
            (grad * x.detach()).sum().backward()
    assert {c.line.text for c in e.communications if c.op == "aten.mm"} == {"product = (x @ w).pow(2).sum()"}


def test_ring_attention() -> None:
    with mesh_of(4, names=("cp",)) as mesh:
        q, k, v = (distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]).requires_grad_() for _ in range(3))
        with explain() as e:
            F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert {(c.phase, c.cause, c.group) for c in e.communications} == {
        ("forward", "kernel", "cp"),
        ("backward", "kernel", "cp"),
    }
    assert all("scaled_dot_product_attention" in c.line.text for c in e.communications)


# ---- functions of shardwise ------------------------------------------------------------------------------------------


def test_redistribute_and_full_tensor() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]).requires_grad_()
        with explain() as e:
            y = x.redistribute(placements=[Replicate()])
            (y * y).sum().backward()
            x.detach().full_tensor()
    assert causes(e) == [("forward", "all-gather", "redistribute"), ("forward", "all-gather", "full_tensor")]
    assert e.communications[0].line.text == "y = x.redistribute(placements=[Replicate()])"
    assert e.communications[0].reason == "redistribute was called: f32[8@tp, 4] -> f32[8, 4]"


def test_the_gradient_of_a_redistribution() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.randn(8, 4), mesh, [Replicate()]).requires_grad_()
        with explain() as e:
            y = x.redistribute(placements=[Shard(0)])
            (y * y).sum().backward()
    assert causes(e) == [("backward", "all-gather", "gradient")]
    assert e.communications[0].line.text == "y = x.redistribute(placements=[Shard(0)])"


def test_leaf_gradients_alone_and_in_buckets() -> None:
    with mesh_of(2, names=("dp",)) as mesh:
        model = distribute_module(MLP(), mesh)
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
        with explain() as bucketed:
            model(x).sum().backward()
        model.zero_grad()
        with bucket_gradients(None), explain() as alone:
            model(x).sum().backward()
        model.zero_grad()
        with accumulate_gradients(), explain() as none:
            model(x).sum().backward()
    (bucket,) = bucketed.communications
    assert (bucket.cause, bucket.phase, bucket.group) == ("gradient bucket", "backward", "dp")
    assert set(bucket.operand.split(", ")) <= {f"MLP.{name}" for name, _ in MLP().named_parameters()}
    assert bucket.line.text in ("hidden = self.up(x).relu()", "return self.down(hidden)")
    assert {c.cause for c in alone.communications} == {"leaf gradient"}
    assert len(alone.communications) > 1
    first = alone.communications[0]
    assert first.module == "MLP.down"
    assert first.line.text == "return self.down(hidden)"
    assert "accumulate_gradients" in first.edit
    assert none.communications == []


def test_gradients_of_local_batches_have_names_and_lines() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = shardwise.replicate(MLP(), mesh=mesh)
        with explain() as e:
            out = model(torch.randn(4, 8))
            out.sum().backward()
    (bucket,) = e.communications
    assert set(bucket.operand.split(", ")) == {f"ReplicateMLP.{name}" for name, _ in MLP().named_parameters()}
    assert bucket.module in ("ReplicateMLP.up", "ReplicateMLP.down")
    assert bucket.line is not None
    assert bucket.line.path == __file__


def test_a_leaf_has_the_name_of_its_variable() -> None:
    with mesh_of(2, names=("dp",)) as mesh:
        weight = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()]).requires_grad_()
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
        with explain() as e:
            (x @ weight).sum().backward()
    assert e.communications[0].operand == "weight"


def test_styles_convert() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        model = parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        x = torch.randn(4, 8, requires_grad=True)
        with explain() as e:
            model(x).sum().backward()
    assert causes(e) == [("forward", "all-reduce", "conversion"), ("backward", "all-reduce", "gradient")]
    forward, backward = e.communications
    assert forward.module == "MLP.down"
    assert forward.line.text == "return self.down(hidden)"
    assert backward.module == "MLP.up"
    assert backward.line.text == "hidden = self.up(x).relu()"
    assert "a style converts the output of MLP.down" in forward.reason


def test_fully_shard_gathers_and_reduces() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = nn.Sequential(MLP(), MLP())
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with explain() as e:
            loss = model(torch.randn(4, 8)).sum()
            loss.backward()
    assert [c.cause for c in e.communications] == ["gather parameters"] * 4 + ["reduce gradients"] * 2
    assert [c.phase for c in e.communications] == ["forward"] * 2 + ["backward"] * 4
    assert {c.module for c in e.communications} == {"FSDPSequential.0", "FSDPSequential.1"}
    assert {c.line.text for c in e.communications} == {"loss = model(torch.randn(4, 8)).sum()"}
    assert "reshard_after_forward=False" in e.communications[2].edit


def test_local_map_and_the_users_own_collectives() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])

        def summed(local):
            dist.all_reduce(local, group=mesh.get_group())
            return local

        run = local_map(summed, [Replicate()], ([Replicate()],), device_mesh=mesh, redistribute_inputs=True)
        with explain() as e:
            run(x)
    assert [c.cause for c in e.communications] == ["conversion", "program"]
    assert e.communications[1].line.text == "dist.all_reduce(local, group=mesh.get_group())"


def test_data_of_one_rank_is_distributed() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh, explain() as e:
        distribute_tensor(torch.randn(8, 4), mesh, [Shard(0), Replicate()])
    assert {c.cause for c in e.communications} == {"distribute"}
    assert all("src_data_rank=None" in c.edit for c in e.communications)


def test_erased_steps_have_the_lines_of_their_recording() -> None:
    with mesh_of(4, names=("tp",)) as mesh, torch.no_grad():
        step = shardwise.erase(product_and_softmax)
        x, w = conflicting_product(mesh)
        step(x, w.detach())
        with explain() as e:
            step(x, w.detach())
    numbers = lines_of(product_and_softmax)
    assert [(c.cause, c.line.number) for c in e.communications] == [
        ("erased step", numbers["product"]),
        ("erased step", numbers["softmax"]),
    ]


# ---- everything together ---------------------------------------------------------------------------------------------


def step(mesh) -> tuple[Explanation, CommDebugMode]:
    model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)})
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Replicate()])
    with CommDebugMode() as comm, explain() as e:
        out = model(x)
        out.softmax(0).pow(2).sum().backward()
        x.norm().full_tensor()
    return e, comm


def agrees(e: Explanation, comm: CommDebugMode) -> None:
    assert len(e.communications) == comm.get_total_counts() > 0
    assert e.total.bytes == comm.get_total_bytes()
    assert [c.module for c in e.communications if c.module != "Global"]
    for c in e.communications:
        assert c.cause in CAUSES
        assert c.reason
        assert c.line is not None
        assert c.seconds > 0
        assert c.over
        assert c.line.path.endswith("test_explain.py")


def test_it_counts_what_comm_debug_mode_counts() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        agrees(*step(mesh))


@on_processes
def test_on_processes() -> None:
    e, comm = step(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    agrees(e, comm)
    assert "a style converts the output of MLP.down" in str(e)
    everyone: list[object] = [None] * 4
    found = [{**c.to_dict(), "edit": None} for c in e.communications]
    dist.all_gather_object(everyone, json.dumps(found))
    assert len(set(everyone)) == 1, "all ranks return the same"


def test_json_holds_everything() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        e = explain(product_and_softmax, x, w)
    read = json.loads(e.to_json())
    assert read["version"] == 1
    assert read["axes"] == {"tp": 4}
    assert read["total"]["count"] == 2
    first = read["communications"][0]
    assert first["line"]["text"] == "y = x @ w  # product"
    assert first["chosen"]["moves"][0]["operand"] == "x"
    assert set(first) >= {"module", "phase", "reason", "rejected", "edit", "bytes", "seconds", "operand", "op", "cause"}
    assert isinstance(e.result, DTensor)
    assert e.by("kind")["all-gather"].count == 2
    assert e.by("line").keys() == {str(c.line) for c in e.communications}


def test_text_counts_what_repeats() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, _ = conflicting_product(mesh)
        with explain() as e:
            for _ in range(3):
                x.redistribute(placements=[Replicate()])
    assert "3 times" in str(e)
    assert str(e).count("all-gather") == 1
    with explain() as quiet:
        pass
    assert str(quiet) == "nothing is communicated"


def test_explanations_nest_and_leave_nothing_behind() -> None:
    before = DTensor.__torch_dispatch__, DTensor.redistribute, nn.Module.__call__, torch.is_anomaly_enabled()
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = conflicting_product(mesh)
        with explain() as outer:
            x @ w
            with explain() as inner:
                x.redistribute(placements=[Replicate()])
        with pytest.raises(ZeroDivisionError), explain():
            1 / 0  # noqa: B018
    assert (len(outer.communications), len(inner.communications)) == (2, 1)
    after = DTensor.__torch_dispatch__, DTensor.redistribute, nn.Module.__call__, torch.is_anomaly_enabled()
    assert after == before


def test_results_are_the_same_as_without() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Replicate()])
        model = distribute_module(MLP(), mesh)
        model(x).sum().backward()
        plain = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad()
        with explain():
            model(x).sum().backward()
        explained = [p.grad.full_tensor() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(plain, explained, strict=True))


def test_worlds_made_inside_are_explained() -> None:
    with explain() as e, shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        x.redistribute(placements=[Replicate()])
    assert e.communications[-1].cause == "redistribute"
