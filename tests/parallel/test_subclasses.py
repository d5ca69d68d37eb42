"""Styles that override methods of PyTorch's styles: their methods are called as PyTorch calls them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, parallel
from shardwise.errors import InputError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.parallel.custom_styles import Experts, LoraLinear, Masked, Rotary, Router, define
from tests.parallel.models import Half, Mlp, first, follows_one_device, line_of, made, rank
from tests.processes.pool import on_processes
from tests.worlds import lone_rank, mesh_of

S1 = Shard(1)
own = define(parallel, shardwise)


class LoraMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = LoraLinear(16, 24), LoraLinear(24, 16)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


PLANS = {
    "in another dtype": (
        lambda: Half(Mlp()),
        lambda use: {
            "norm": SequenceParallel(),
            "inner.up": own.WideGatherColwise(input_layouts=S1, **use),
            "inner.down": own.FlippedRowwise(output_layouts=S1, **use),
        },
    ),
    "adapters": (
        lambda: Half(LoraMlp()),
        lambda use: {
            "norm": own.SequenceLora(),
            "inner.up": own.ColwiseLora(input_layouts=S1, **use),
            "inner.down": own.RowwiseLora(output_layouts=S1, **use),
        },
    ),
    "gathered after the norm": (
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)),
        lambda use: {
            "0": own.SequenceGather(),
            "1": own.ColwiseLora(**use),
            "2": own.LinearRowwise(output_layouts=S1, **use),
        },
    ),
    "own modules": (
        lambda: nn.Sequential(Router(16), nn.LayerNorm(16)),
        lambda use: {
            "0": own.RouterColwise(input_layouts=S1, output_layouts=S1, **use),
            "1": own.NoParallel(input_layout=S1, output_layout=S1, **use),
        },
    ),
}


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PLANS)
def test_follows_one_device(name, ranks, local) -> None:
    make, plan = PLANS[name]
    with line_of(ranks) as mesh:
        follows_one_device(
            make,
            lambda m, mesh: parallelize_module(m, mesh, plan({"use_local_output": local})),
            mesh,
            torch.randn(2, 8, 16),
            sharded=1,
            output_sharded=1,
            distributed=not local,
        )


@pytest.mark.parametrize("name", PLANS)
@on_processes
def test_on_processes(name) -> None:
    make, plan = PLANS[name]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    follows_one_device(
        make,
        lambda m, mesh: parallelize_module(m, mesh, plan({"use_local_output": True})),
        mesh,
        torch.randn(2, 8, 16),
        sharded=1,
        output_sharded=1,
    )


@on_processes
def test_tokens_travel_to_their_experts() -> None:
    """Each rank has three tokens for each of eight experts, of which it holds two."""
    tokens = torch.randn(4, 8, 3, 6, generator=torch.Generator().manual_seed(1))
    alone = made(lambda: Experts(8, 6))
    whole = tokens.transpose(0, 1).flatten(1, 2).requires_grad_()
    expected = alone(whole)
    expected.square().sum().backward()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    model = parallelize_module(made(lambda: Experts(8, 6)), mesh, own.ExpertParallel())
    given = tokens[rank()].clone().requires_grad_()
    found = model(given)
    found.square().sum().backward()
    mine = slice(3 * rank(), 3 * rank() + 3)
    torch.testing.assert_close(found.detach(), expected[:, mine].detach())
    torch.testing.assert_close(given.grad, whole.grad[:, mine])
    torch.testing.assert_close(model.weight.grad.full_tensor(), alone.weight.grad)


@pytest.mark.parametrize("full_mesh", [True, False])
def test_on_a_mesh_of_two_axes(full_mesh) -> None:
    """Given the 2-D mesh, a method that calls the one it overrides acts on tp. Given `mesh["tp"]`, all methods do."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16)
    alone = made(Mlp)
    expected = alone(x)
    expected.square().sum().backward()
    up = own.ColwiseLora(use_local_output=False) if not full_mesh else ColwiseParallel(use_local_output=False)
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        model = made(Mlp)
        plan = {"up": up, "down": own.FlippedRowwise(use_local_output=False)}
        parallelize_module(model, mesh if full_mesh else mesh["tp"], plan)
        given = distribute_tensor(x, mesh, [Shard(0), Replicate()])
        out = model(given if full_mesh else x)
        torch.testing.assert_close(first(out), expected.detach())
        out.square().sum().backward()
        for parameter, reference in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(first(parameter.grad), reference.grad)


def test_a_style_over_another_axis_cannot_tell_its_methods() -> None:
    with mesh_of(2, 2, names=("tp", "model")) as mesh:
        style = own.FlippedRowwise().over("model")
        with pytest.raises(InputError, match=r"overrides _prepare_input_fn .* 'model' .* mesh\['model'\]"):
            parallelize_module(nn.Linear(16, 8), mesh, style)
        assert parallelize_module(nn.Linear(16, 8), mesh["model"], style).weight.placements == (Shard(1),)


@pytest.mark.parametrize("kind", ["ColwiseLora", "RowwiseLora"])
def test_embeddings(kind) -> None:
    ids = torch.randint(0, 12, (2, 6))
    with line_of(4) as mesh:
        style = getattr(own, kind)(input_layouts=Replicate(), output_layouts=Replicate())
        follows_one_device(lambda: nn.Embedding(12, 16), lambda m, mesh: parallelize_module(m, mesh, style), mesh, ids)


class Gated(nn.Module):
    """Two projections in one weight; their sizes follow from the output, so that it works on local shards."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.down = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x):
        gate, up = self.fused(x).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_projections_in_one_weight(ranks) -> None:
    x, alone = torch.randn(2, 4, 16), made(Gated)
    alone(x).square().sum().backward()
    with line_of(ranks) as mesh:
        model = made(Gated)
        parallelize_module(model, mesh, {"fused": own.FusedColwise(sections=[24, 24]), "down": own.WaitingRowwise()})
        out = model(x)
        torch.testing.assert_close(first(out), alone(x).detach())
        out.square().sum().backward()
        torch.testing.assert_close(first(model.down.weight.grad), alone.down.weight.grad)
        for name in ("weight", "bias"):
            whole = getattr(alone.fused, name).grad
            halves = [half.chunk(ranks) for half in whole.chunk(2)]
            by_rank = [half[rank] for rank in range(ranks) for half in halves]
            torch.testing.assert_close(first(getattr(model.fused, name).grad), torch.cat(by_rank))


def test_the_class_of_a_style_may_be_changed() -> None:
    style = ColwiseParallel()
    style.__class__ = own.ColwiseLora
    with line_of(4) as mesh:
        module = parallelize_module(LoraLinear(16, 8), mesh, style)
        assert {p.placements for p in module.parameters()} == {(Shard(0),)}


def test_several_inputs_and_outputs() -> None:
    x, factors = torch.randn(2, 8, 4), torch.randn(2, 8, 4)
    with line_of(4) as mesh:
        module = parallelize_module(Rotary(), mesh, own.SequenceRotary(use_local_output=False))
        local = distribute_tensor(x, mesh, [S1]).to_local()
        for found, expected in zip(module(local, factors), Rotary()(x, factors), strict=True):
            torch.testing.assert_close(first(found), expected)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", ["OptionalInput", "OptionalInputOutput"])
def test_an_input_that_may_be_none(kind, by_name) -> None:
    x, mask = torch.randn(2, 8, 16), torch.randn(2, 8, 1)
    pairs = {"input_layouts": (S1, Replicate()), "desired_input_layouts": (Replicate(), S1)}
    if by_name:
        pairs = {"input_layouts": (S1,), "desired_input_layouts": (Replicate(),)}
        pairs |= {"input_kwarg_layouts": {"mask": Replicate()}, "desired_input_kwarg_layouts": {"mask": S1}}
    if kind == "OptionalInputOutput":
        pairs |= {"output_layouts": Replicate(), "desired_output_layouts": S1, "use_local_output": False}
    alone = made(lambda: Masked(16))
    with line_of(4) as mesh:
        plan = {"": getattr(own, kind)(**pairs), "linear": own.NoParallel(use_local_output=False)}
        model = parallelize_module(made(lambda: Masked(16)), mesh, plan)
        local = distribute_tensor(x, mesh, [S1]).to_local()
        for given in (mask, None):
            out = model(local, mask=given) if by_name else model(local, given)
            torch.testing.assert_close(first(out), alone(x, given).detach())


def test_inputs_and_outputs_by_ones_own_methods() -> None:
    x = torch.randn(2, 8, 16)
    with line_of(4) as mesh:
        style = own.PaddedInput(input_layouts=S1, desired_input_layouts=Replicate())
        model = parallelize_module(nn.Identity(), mesh, style)
        local = distribute_tensor(x, mesh, [S1]).to_local()
        torch.testing.assert_close(first(model(local, "dropped")), x)
        style = own.FirstOutput(output_layouts=Partial(), desired_output_layouts=S1, use_local_output=False)
        pair = parallelize_module(Rotary(), mesh, style)
        torch.testing.assert_close(first(pair(x, x * 0)), 4 * x)


def test_ties_outlast_methods_that_replace_parameters_of_one_owner() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head, self.other = nn.Embedding(12, 16), nn.Linear(16, 12), nn.Linear(16, 12)
            self.head.weight = self.other.weight = self.embedding.weight

    with line_of(4) as mesh:
        model = Tied()
        old = model.embedding.weight
        plan = {"embedding": own.RowwiseLora(), "head": own.ColwiseLora()}
        parallelize_module(model, mesh, plan)
        assert model.embedding.weight is model.head.weight is model.other.weight is not old
        assert isinstance(model.other.weight, DTensor)


def test_the_module_that_a_style_returns_is_returned() -> None:
    class Wrapped(shardwise.parallel.ParallelStyle):
        def _apply(self, module, device_mesh):
            return nn.Sequential(module)

    with line_of(2) as mesh:
        assert isinstance(parallelize_module(nn.Linear(2, 2), mesh, Wrapped()), nn.Sequential)


TAKEN_OVER = """
import shardwise
shardwise.install()
import torch
import torch.distributed.tensor as tensor
import torch.distributed.tensor.parallel as parallel
from tests.parallel.custom_styles import define
from tests.parallel.models import Half, Mlp, follows_one_device, line_of

own, S1 = define(parallel, tensor), tensor.Shard(1)
plan = {
    "norm": own.SequenceLora(),
    "inner.up": own.WideGatherColwise(input_layouts=S1),
    "inner.down": own.RowwiseLora(output_layouts=S1),
}
with line_of(4) as mesh:
    follows_one_device(
        lambda: Half(Mlp()),
        lambda m, mesh: parallel.parallelize_module(m, mesh, plan),
        mesh,
        torch.randn(2, 8, 16),
        sharded=1,
        output_sharded=1,
    )
assert issubclass(own.ColwiseLora, shardwise.parallel.ColwiseParallel)
print("equal to one device")
"""


def test_in_the_place_of_pytorch() -> None:
    found = subprocess.run([sys.executable, "-c", TAKEN_OVER], capture_output=True, text=True, check=False)
    assert found.stdout == "equal to one device\n", found.stderr


# ---- beside PyTorch --------------------------------------------------------------------------------------------------

METHODS = {
    "ColwiseParallel": "_partition_linear_fn _partition_embedding_fn _prepare_input_fn _prepare_output_fn",
    "RowwiseParallel": "_partition_linear_fn _partition_embedding_fn _prepare_input_fn _prepare_output_fn",
    "SequenceParallel": "_replicate_module_fn _prepare_input_fn _prepare_output_fn",
    "PrepareModuleInput": "_prepare_input_fn _prepare_input_arg _prepare_input_kwarg_fn",
    "PrepareModuleOutput": "_prepare_out_fn",
}


def recording(style: type, names: str, calls: list[object]) -> type:
    """A subclass that records how its methods are called, and calls those that it overrides."""

    def method(name, static):
        def record(*args):
            calls.append((name, *map(described, args)))
            return getattr(style, name)(*args)

        record.__signature__ = inspect.signature(getattr(style, name))
        return staticmethod(record) if static else record

    static = {name: isinstance(vars_of(style)[name], staticmethod) for name in names.split()}
    return type("Recording", (style,), {name: method(name, flag) for name, flag in static.items()})


def vars_of(style: type) -> dict[str, object]:
    return {name: value for base in reversed(style.__mro__) for name, value in vars(base).items()}


def described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        # The one placement that differs is that of an embedding's sum.
        placements = ["Partial(sum)" if p.is_partial() else repr(p) for p in getattr(value, "placements", ())]
        return f"tensor {list(value.shape)} {placements}"
    if isinstance(value, tuple):
        return tuple(map(described, value))
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    named = (nn.Module, shardwise.DeviceMesh, parallel.ParallelStyle, torch_parallel.ParallelStyle)
    return type(value).__name__ if isinstance(value, named) else repr(value)


CASES = {
    "colwise": ("ColwiseParallel", lambda t: {}, lambda: nn.Linear(8, 8), "x"),
    "colwise of a sequence": (
        "ColwiseParallel",
        lambda t: {"input_layouts": t.Shard(1), "use_local_output": False},
        lambda: nn.Linear(8, 8),
        "x",
    ),
    "colwise embedding": ("ColwiseParallel", lambda t: {}, lambda: nn.Embedding(8, 8), "ids"),
    "rowwise": (
        "RowwiseParallel",
        lambda t: {"input_layouts": t.Replicate(), "output_layouts": t.Shard(1)},
        lambda: nn.Linear(8, 8),
        "x",
    ),
    "rowwise embedding": (
        "RowwiseParallel",
        lambda t: {"input_layouts": t.Replicate()},
        lambda: nn.Embedding(8, 8),
        "ids",
    ),
    "sequence": ("SequenceParallel", lambda t: {}, lambda: nn.LayerNorm(8), "x"),
    "sequence 0": (
        "SequenceParallel",
        lambda t: {"sequence_dim": 0, "use_local_output": True},
        lambda: nn.LayerNorm(8),
        "x",
    ),
    "input": (
        "PrepareModuleInput",
        lambda t: {"input_layouts": t.Shard(0), "desired_input_layouts": t.Replicate()},
        nn.Identity,
        "x",
    ),
    "input by name": (
        "PrepareModuleInput",
        lambda t: {
            "input_layouts": (t.Shard(0),),
            "desired_input_layouts": (t.Replicate(),),
            "input_kwarg_layouts": {"factors": t.Replicate()},
            "desired_input_kwarg_layouts": {"factors": t.Replicate()},
        },
        Rotary,
        "named",
    ),
    "output": (
        "PrepareModuleOutput",
        lambda t: {"output_layouts": t.Replicate(), "desired_output_layouts": t.Shard(0)},
        nn.Identity,
        "x",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_methods_are_called_as_pytorch_calls_them(name) -> None:
    kind, options, make, given = CASES[name]
    x = {"ids": torch.zeros(2, 4, dtype=torch.long)}.get(given, torch.randn(4, 4, 8))
    seen = []
    with lone_rank() as mesh:
        for p, t in ((torch_parallel, torch_tensor), (parallel, shardwise)):
            calls: list[object] = []
            style = recording(getattr(p, kind), METHODS[kind], calls)(**options(t))
            module = p.parallelize_module(make(), mesh, style)
            out = module(x, factors=x.repeat(4, 1, 1)) if given == "named" else module(x)
            seen.append((calls, described(out)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", METHODS)
def test_signatures_are_those_of_pytorch(kind) -> None:
    def described_methods(p):
        for name in METHODS[kind].split():
            method = vars_of(getattr(p, kind))[name]
            parameters = inspect.signature(getattr(method, "__func__", method)).parameters
            yield name, isinstance(method, staticmethod), list(parameters)

    assert list(described_methods(torch_parallel)) == list(described_methods(parallel))


def test_attributes_are_those_of_pytorch() -> None:
    def attributes(p, t):
        styles = [
            p.ColwiseParallel(),
            p.ColwiseParallel(input_layouts=t.Shard(1), output_layouts=t.Replicate(), use_local_output=False),
            p.RowwiseParallel(output_layouts=t.Shard(1)),
            p.SequenceParallel(sequence_dim=2),
            p.PrepareModuleInput(input_layouts=t.Shard(0), desired_input_layouts=t.Replicate()),
            p.PrepareModuleOutput(output_layouts=t.Shard(0), desired_output_layouts=t.Replicate()),
        ]
        return [{name: repr(value) for name, value in vars(style).items()} for style in styles]

    for theirs, ours in zip(attributes(torch_parallel, torch_tensor), attributes(parallel, shardwise), strict=True):
        assert theirs.items() <= ours.items()
    assert RowwiseParallel().src_data_rank == torch_parallel.RowwiseParallel().src_data_rank == 0
