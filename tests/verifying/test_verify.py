"""`verify`: its arguments, its report, and how code for local tensors runs."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import P, Shard, distribute_module, local_map
from shardwise.errors import InputError, WorldError
from shardwise.fsdp import fully_shard

from .pieces import MLP, mean_over, shard_of

X, Y = torch.randn(4, 4), torch.randn(4, 4)
DP = {"mesh": (2,), "names": ("dp",)}


def nothing(model, mesh):
    pass


def squares(output):
    return output.square().mean()


def averaging_step(model, batch, mesh):
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    if mesh is not None:
        mean_over([p.grad for p in model.parameters()], mesh, "dp")
    return loss


def rows(batch, mesh):
    return tuple(shard_of(x, 0, mesh, "dp") for x in batch)


# ---- arguments -------------------------------------------------------------------------------------------------------


class Named(MLP):
    def forward(self, x, scale):
        return super().forward(x) * scale


class WithLoss(MLP):
    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        (MLP, X, squares),
        (MLP, (X, Y), F.mse_loss),
        (Named, (X, X.abs(), Y), F.mse_loss),
        (Named, {"x": X, "scale": 2.0}, lambda output, batch: F.mse_loss(output, batch["x"])),
        (MLP, lambda step: (X + step, Y), F.mse_loss),
        (WithLoss, X, None),
    ],
    ids=["tensor", "target", "inputs", "by name", "function", "model returns loss"],
)
def test_batches(model, batch, loss):
    report = shardwise.verify(model, lambda m, mesh: distribute_module(m, mesh), batch, loss=loss, place=P("dp"), **DP)
    assert report.ok, str(report)


def test_no_loss():
    with pytest.raises(InputError, match="pass loss="):
        shardwise.verify(MLP, nothing, X, **DP)


def test_axes_have_names():
    with pytest.raises(InputError, match="a name of its own"):
        shardwise.verify(MLP, nothing, X, loss=squares, mesh=(2, 2), names=("dp",))
    assert "axis0=2" in shardwise.verify(MLP, nothing, X, loss=squares, mesh=(2,)).mesh


def test_a_program_without_an_optimizer():
    report = shardwise.verify(MLP, nothing, (X, Y), step=averaging_step, place=rows, optimizer=None, steps=1, **DP)
    assert report.ok, str(report)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.float64, None], ids=["float64", "own dtype"])
def test_optimizers_that_amplify_rounding_raise_no_alarm(optimizer, dtype):
    def apply(model, mesh):
        fully_shard(model, mesh=mesh)

    def step(model, batch, mesh):
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss

    report = shardwise.verify(
        MLP, apply, (X, Y), step=step, place=rows, optimizer=lambda p: optimizer(p, lr=0.1), dtype=dtype, steps=5, **DP
    )
    assert report.ok, str(report)
    assert report.dtype == ("float64" if dtype else "float32")


class SinglePrecision(MLP):
    """A model that cannot run in float64."""

    def forward(self, x):
        return super().forward(x) @ torch.eye(4, dtype=torch.float32)


def test_a_model_that_needs_its_own_dtype():
    report = shardwise.verify(SinglePrecision, nothing, (X, Y), step=averaging_step, place=rows, **DP)
    assert report.ok, str(report)
    assert report.dtype == "float32"
    assert "compared in the model's own dtype" in str(report)


class Rounded(MLP):
    """A model that rounds to bfloat16 on its way."""

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).bfloat16().to(x.dtype).relu())


def test_rounding_inside_the_model_is_no_difference():
    report = shardwise.verify(Rounded, nothing, (X, Y), step=averaging_step, place=rows, **DP)
    assert report.ok, str(report)
    assert report.dtype == "bfloat16"


def test_the_random_state_and_default_dtype_are_left_alone():
    state = torch.get_rng_state()
    shardwise.verify(MLP, nothing, X, loss=squares, steps=1, **DP)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert torch.manual_seed.__module__ == "torch.random"
    assert not dist.is_initialized()


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_as_json():
    report = shardwise.verify(MLP, nothing, (X, Y), step=averaging_step, place=rows, **DP)
    found = json.loads(report.to_json())
    assert found["ok"]
    assert found["first"] is None
    assert found["mesh"] == "dp=2"
    assert bool(report)


def test_the_line_of_a_module_is_where_it_is_called():
    def step(model, batch, mesh):
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss

    report = shardwise.verify(MLP, nothing, (X, Y), step=step, place=rows, **DP)
    first = report.differences[0]
    assert (first.kind, first.path) == ("gradient", "down.weight")
    assert first.line.startswith("pieces.py:")
    assert "self.down(" in first.line
    assert "only the average over dp is the reference" in first.how


def test_an_error_of_the_program_is_raised():
    def step(model, batch, mesh):
        if mesh is not None:
            raise ValueError("no such thing")
        return averaging_step(model, batch, mesh)

    with pytest.raises(ValueError, match="no such thing"):
        shardwise.verify(MLP, nothing, (X, Y), step=step, **DP)


def test_an_error_after_a_difference_is_a_note():
    def step(model, batch, mesh):
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None:
            loss.item()  # each rank has its own
        return loss

    def apply(model, mesh):
        model.up.register_forward_hook(lambda _, __, output: output * (1 + mesh.get_local_rank("dp")))

    report = shardwise.verify(MLP, apply, (X, Y), step=step, **DP)
    assert not report.ok
    assert report.first == "up"
    assert "WorldError" in report.notes[0]


def test_what_has_no_twin_is_named():
    def apply(model, mesh):
        model.extra = nn.Parameter(torch.zeros(2))

    report = shardwise.verify(MLP, apply, X, loss=squares, **DP)
    assert report.ok
    assert "extra" in report.notes[0]


# ---- code for local tensors ------------------------------------------------------------------------------------------


def test_numbers_of_ranks():
    seen = {}

    def step(model, batch, mesh):
        if mesh is not None:
            seen["world"] = str(dist.get_rank())
            seen["group"] = str(dist.get_rank(mesh.get_group("tp")))
            seen["mesh"] = str(mesh.get_rank())
            seen["coordinate"] = [str(number) for number in mesh.get_coordinate()]
            seen["submesh"] = str(mesh["tp"].get_local_rank())
            rank = mesh.get_local_rank("tp")
            own = torch.arange(2) + 2 * rank
            assert [shard.tolist() for shard in own.shards] == [[0, 1], [2, 3]] * 2
            first = batch.new_ones(1) * (rank == 0)
            assert [shard.item() for shard in first.shards] == [1, 0] * 2
            assert (torch.arange(4)[rank * 2 : rank * 2 + 2] == own).all()
        loss = squares(model(batch))
        loss.backward()
        return loss

    report = shardwise.verify(MLP, nothing, X, step=step, mesh=(2, 2), names=("dp", "tp"))
    assert report.ok, str(report)
    assert seen == {
        "world": "(0 | 1 | 2 | 3)",
        "group": "(0 | 1 | 0 | 1)",
        "mesh": "(0 | 1 | 2 | 3)",
        "coordinate": ["(0 | 0 | 1 | 1)", "(0 | 1 | 0 | 1)"],
        "submesh": "(0 | 1 | 0 | 1)",
    }
    assert dist.get_rank.__module__ == "torch.distributed.distributed_c10d"


def test_a_branch_on_the_rank_is_an_error():
    def apply(model, mesh):
        if mesh.get_local_rank("dp") == 0:
            raise AssertionError("no one branch is that of all ranks")

    with pytest.raises(WorldError, match="branches on the number of a rank"):
        shardwise.verify(MLP, apply, X, loss=squares, **DP)


def test_collectives_of_plain_tensors():
    def step(model, batch, mesh):
        if mesh is not None:
            count = torch.ones(2)
            dist.all_reduce(count, group=mesh.get_group("dp"))
            assert count.tolist() == [2, 2]
            model.made.fill_(1.0)
            total = torch.zeros(())
            total += 1.0 + mesh.get_local_rank("dp")
            dist.all_reduce(total)
            assert total.item() == 3
            dist.barrier()
        loss = squares(model(batch))
        loss.backward()
        return loss

    def build():
        model = MLP()
        model.register_buffer("made", torch.ones(2))
        return model

    report = shardwise.verify(build, nothing, X, step=step, **DP)
    assert report.ok, str(report)


def test_local_map_and_styles_with_local_outputs():
    class Model(MLP):
        mesh = None

        def forward(self, x):
            hidden = self.up(self.norm(x))
            if self.mesh is not None:
                spread = shardwise.DTensor.from_local(hidden, self.mesh, [Shard(0)])
                on_ranks = local_map(
                    torch.relu, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=self.mesh
                )
                return self.down(on_ranks(spread).to_local())
            return self.down(hidden.relu())

    def apply(model, mesh):
        model.mesh = mesh

    report = shardwise.verify(Model, apply, (X, Y), step=averaging_step, place=rows, **DP)
    assert report.ok, str(report)
