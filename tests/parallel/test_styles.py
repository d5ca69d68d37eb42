"""Every style on every kind of module: outputs and gradients are those of one device."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import (
    DTensor,
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tests.parallel.models import Attention, Half, Mlp, first, follows_one_device, line_of, made
from tests.processes.pool import on_processes

S1 = Shard(1)
distributed = {"use_local_output": False}


def mlp_plans(local: bool) -> dict[str, dict[str, object]]:
    use = {"use_local_output": local}
    return {
        "tensor": {"norm": "replicate", "inner.up": ColwiseParallel(**use), "inner.down": RowwiseParallel(**use)},
        "sequence": {
            "norm": SequenceParallel(),
            "inner.up": ColwiseParallel(input_layouts=S1, **use),
            "inner.down": RowwiseParallel(output_layouts=S1, **use),
        },
    }


# 8 ranks on 7 positions and 20 features: some hold less than others, some nothing. Local sequences must be even.
@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_mlp(kind, local, ranks) -> None:
    plan = mlp_plans(local)[kind]
    dim = 1 if kind == "sequence" else None
    length = 24 if kind == "sequence" and local else 7
    with line_of(ranks) as mesh:
        follows_one_device(
            lambda: Half(Mlp(hidden=20)),
            lambda m, mesh: parallelize_module(m, mesh, plan),
            mesh,
            torch.randn(2, length, 16),
            sharded=dim,
            output_sharded=dim,
            distributed=not local,
        )


# The number of heads need not divide by the ranks: tensors that cannot stay sharded by heads are redistributed.
@pytest.mark.parametrize(("ranks", "width", "local"), [(4, 16, True), (4, 16, False), (4, 20, False), (3, 16, False)])
def test_attention_of_ones_own(ranks, width, local) -> None:
    use = {"use_local_output": local}
    plan = {
        "norm": SequenceParallel(),
        "inner": PrepareModuleInput(input_layouts=S1, desired_input_layouts=Replicate()),
        "inner.[qkv]": ColwiseParallel(**use),
        "inner.o": RowwiseParallel(output_layouts=S1, **use),
    }
    with line_of(ranks) as mesh:
        follows_one_device(
            lambda: Half(Attention(width), width=width),
            lambda m, mesh: parallelize_module(m, mesh, plan),
            mesh,
            torch.randn(2, 8 if local else 6, width),
            sharded=1,
            output_sharded=1,
            distributed=not local,
        )


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool = False, **options: object) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(16, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return out if weights is None else out + weights.sum()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"bias": False}, {"batch_first": True, "need_weights": True}], ids=str
)
def test_multihead_attention_is_sharded_by_heads(options, ranks) -> None:
    with line_of(ranks) as mesh:

        def parallelize(model, mesh):
            parallelize_module(model, mesh, {"attention": ColwiseParallel()})
            assert model.attention.in_proj_weight.placements == (InterleavedShard(0, 3),)
            assert model.attention.out_proj.weight.placements == (Shard(1),)

        forward, backward = follows_one_device(
            lambda: SelfAttention(**options), parallelize, mesh, torch.randn(2, 6, 16)
        )
        if ranks in (2, 4) and not options.get("need_weights"):
            assert forward == backward == {"all_reduce": 1}


def test_a_transformer_layer_of_pytorch() -> None:
    plan = {
        "self_attn": ColwiseParallel(),
        "norm*": "replicate",
        "linear1": "colwise",
        "linear2": "rowwise",
    }
    with line_of(4) as mesh:
        follows_one_device(
            lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
            lambda m, mesh: parallelize_module(m, mesh, plan),
            mesh,
            torch.randn(2, 6, 16),
        )


CONVOLUTIONS = {
    "conv2d": lambda: nn.Sequential(nn.Conv2d(8, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 4, 3)),
    "conv_transpose1d": lambda: nn.Sequential(nn.ConvTranspose1d(8, 10, 3), nn.ReLU(), nn.ConvTranspose1d(10, 4, 3)),
}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, ranks) -> None:
    x = torch.randn(2, 8, *([6] * int(name[-2])))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    with line_of(ranks) as mesh:
        follows_one_device(CONVOLUTIONS[name], lambda m, mesh: parallelize_module(m, mesh, plan), mesh, x)


@pytest.mark.parametrize(
    ("make", "style"),
    [
        (lambda: nn.Conv2d(8, 8, 3, groups=4), ColwiseParallel(output_layouts=Replicate())),
        (lambda: nn.ConvTranspose2d(8, 8, 3, groups=4), RowwiseParallel(input_layouts=Replicate())),
        (lambda: nn.Conv1d(8, 6, 3), ColwiseParallel(output_layouts=Replicate())),
    ],
    ids=["by groups", "transposed, by groups", "unbatched"],
)
def test_grouped_and_unbatched_convolutions(make, style) -> None:
    x = torch.randn(8, 9) if isinstance(make(), nn.Conv1d) else torch.randn(2, 8, 5, 5)
    with line_of(4) as mesh:
        follows_one_device(make, lambda m, mesh: parallelize_module(m, mesh, style), mesh, x)


@pytest.mark.parametrize(
    "style",
    [
        RowwiseParallel(input_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=S1, **distributed),
        ColwiseParallel(output_layouts=Replicate()),
        ColwiseParallel(**distributed),
    ],
    ids=repr,
)
@pytest.mark.parametrize("ranks", [3, 4])
def test_embeddings(style, ranks) -> None:
    with line_of(ranks) as mesh:
        tokens = torch.randint(0, 11, (3, 5))
        make = lambda: nn.Embedding(11, 6, padding_idx=2)  # noqa: E731
        follows_one_device(make, lambda m, mesh: parallelize_module(m, mesh, style), mesh, tokens)


class UserNorm(nn.Module):
    """A norm as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


@pytest.mark.parametrize("make", [UserNorm, partial(nn.RMSNorm, 16), partial(nn.LayerNorm, 16), nn.Identity], ids=str)
def test_norms_on_a_sharded_sequence(make) -> None:
    with line_of(4) as mesh:
        for local in (True, False):
            style = SequenceParallel(use_local_output=local)
            follows_one_device(
                make,
                lambda m, mesh, style=style: parallelize_module(m, mesh, style),
                mesh,
                torch.randn(2, 8 if local else 7, 16),
                sharded=1,
                output_sharded=1,
                distributed=not local,
            )


def test_batch_norm_over_a_sharded_batch_keeps_its_statistics() -> None:
    alone = nn.BatchNorm1d(4)
    x = torch.randn(10, 4)
    alone(x)
    with line_of(4) as mesh:
        norm = parallelize_module(nn.BatchNorm1d(4), mesh, SequenceParallel(sequence_dim=0))
        norm(distribute_tensor(x, mesh, [Shard(0)]))
        torch.testing.assert_close(first(norm.running_mean), alone.running_mean)
        torch.testing.assert_close(first(norm.running_var), alone.running_var)


class TwoInputs(nn.Module):
    """A module that keeps its inputs in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def forward(self, a: Tensor, flag: bool, b: Tensor, *, scale: Tensor) -> tuple[Tensor, str, Tensor]:
        self.seen = [a, flag, b, scale]
        return a * 2, "text", b * scale


def placements(value: object) -> object:
    return value.placements if isinstance(value, DTensor) else type(value).__name__


def test_prepare_input_by_position_and_name_and_output() -> None:
    with line_of(4) as mesh:
        local = lambda t: distribute_tensor(t, mesh, [S1]).to_local()  # noqa: E731
        style = PrepareModuleInputOutput(
            input_layouts=(S1, None, S1),
            desired_input_layouts=(Replicate(), None, None),
            input_kwarg_layouts={"scale": Replicate()},
            desired_input_kwarg_layouts={"scale": S1},
            output_layouts=(None, None, Partial()),
            desired_output_layouts=(Shard(0), None, Replicate()),
        )
        model = parallelize_module(TwoInputs(), mesh, style)
        a, b, scale = torch.randn(2, 8), torch.randn(2, 8), torch.randn(2, 8)
        out = model(local(a), True, local(b), scale=distribute_tensor(scale, mesh, [Replicate()]).to_local())
        assert [placements(v) for v in model.seen] == [(Replicate(),), "bool", (S1,), (S1,)]
        assert [placements(v) for v in out] == ["RankTensor", "str", "RankTensor"]
        torch.testing.assert_close(
            DTensor.from_local(out[0], mesh, [Shard(0)], run_check=True).full_tensor().shards[0], a * 2
        )
        torch.testing.assert_close(out[2].shards[0], b * scale)


def test_prepare_input_can_give_the_module_local_tensors() -> None:
    with line_of(4) as mesh:
        style = PrepareModuleInput(input_layouts=S1, desired_input_layouts=Shard(0), use_local_output=True)
        model = parallelize_module(nn.Identity(), mesh, style)
        out = model(distribute_tensor(torch.randn(8, 8), mesh, [S1]).to_local())
        assert placements(out) == "RankTensor"
        assert out.shards[0].shape == (2, 8)


def test_a_distributed_input_is_redistributed_from_any_placement() -> None:
    with line_of(4) as mesh:
        style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        model = parallelize_module(nn.Identity(), mesh, style)
        for placement in (Shard(0), S1, Replicate(), Partial()):
            assert placements(model(distribute_tensor(torch.randn(8, 8), mesh, [placement]))) == (Replicate(),)


def test_prepare_output() -> None:
    with line_of(4) as mesh:
        style = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=S1, use_local_output=False)
        model = parallelize_module(nn.Identity(), mesh, style)
        out = model(distribute_tensor(torch.ones(2, 8), mesh, [Replicate()]).to_local())
        assert placements(out) == (S1,)
        assert first(out).eq(4).all()


def test_an_input_given_by_name() -> None:
    with line_of(4) as mesh:
        linear = parallelize_module(made(lambda: nn.Linear(8, 8)), mesh, ColwiseParallel(**distributed))
        x = torch.randn(2, 8)
        out = linear(input=distribute_tensor(x, mesh, [Shard(0)]))
        torch.testing.assert_close(first(out), made(lambda: nn.Linear(8, 8))(x))


def test_a_module_that_looks_like_a_linear() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 8, 12
            self.weight = nn.Parameter(torch.randn(12, 8))
            self.register_buffer("scale", torch.tensor([0.5]))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) * self.scale

    with line_of(4) as mesh:
        follows_one_device(
            Scaled,
            lambda m, mesh: parallelize_module(m, mesh, ColwiseParallel()),
            mesh,
            torch.randn(3, 8),
            output_sharded=1,
        )


def test_the_same_input_prepared_once_until_it_changes() -> None:
    with line_of(4) as mesh:
        a, b = (
            parallelize_module(made(lambda: nn.Linear(8, 8)), mesh, ColwiseParallel(**distributed)) for _ in range(2)
        )
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
        with torch.no_grad():
            assert torch.equal(first(a(x)), first(b(x)))
            before = a(x)
            x.add_(1.0)
            assert not torch.equal(first(before), first(b(x)))
            before = a(x)
            x.to_local().add_(1.0)  # not through the DTensor
            assert not torch.equal(first(before), first(b(x)))
        x.requires_grad_()
        assert b(x).requires_grad


def write_unseen(tensor: Tensor) -> None:
    """Add 1 as a kernel does that has the address: no version counter sees it."""
    for shard in getattr(tensor, "shards", (tensor,)):
        numbers = (ctypes.c_float * shard.numel()).from_address(shard.data_ptr())
        numbers[:] = [number + 1 for number in numbers]


def check_unseen_writes(mesh, layout) -> None:
    style = ColwiseParallel(input_layouts=layout, output_layouts=Replicate(), use_local_output=False)
    q, k = (parallelize_module(made(lambda: nn.Linear(8, 8)), mesh, style) for _ in range(2))
    for grad in (False, True):
        x = distribute_tensor(torch.randn(4, 8), mesh, [layout]).to_local().detach().clone().requires_grad_(grad)
        before = first(q(x)).clone()
        write_unseen(x.detach())
        assert not torch.equal(before, first(k(x)))
        assert torch.equal(first(q(x)), first(k(x)))


@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
def test_writes_to_a_plain_input_between_two_modules_are_seen(layout) -> None:
    with line_of(4) as mesh:
        check_unseen_writes(mesh, layout)


@on_processes
def test_writes_to_a_plain_input_are_seen_on_processes() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for layout in (Replicate(), Shard(0)):
        check_unseen_writes(mesh, layout)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@on_processes
def test_mlp_on_processes(kind, local) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    plan = mlp_plans(local)[kind]
    dim = 1 if kind == "sequence" else None
    for length in (8, 8 if kind == "sequence" and local else 7):
        follows_one_device(
            lambda: nn.Sequential(Half(Mlp(hidden=20)), Half(Mlp(hidden=20))),
            lambda m, mesh: [parallelize_module(half, mesh, plan) for half in m],
            mesh,
            torch.randn(2, length, 16),
            sharded=dim,
            output_sharded=dim,
            distributed=not local,
        )


def test_everything_else_is_replicated_by_distribute_module() -> None:
    plan = {"inner.up": ColwiseParallel(**distributed), "inner.down": RowwiseParallel(**distributed)}
    with line_of(4) as mesh:
        follows_one_device(
            lambda: Half(Mlp()),
            lambda m, mesh: distribute_module(parallelize_module(m, mesh, plan), mesh),
            mesh,
            torch.randn(2, 6, 16),
            distributed=True,
        )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_activation_checkpointing(local, reentrant) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Half(Mlp(hidden=20))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    plan = {f"block.{name}": style for name, style in mlp_plans(local)["sequence"].items()}
    with line_of(4) as mesh:
        follows_one_device(
            Checkpointed,
            lambda m, mesh: parallelize_module(m, mesh, plan),
            mesh,
            torch.randn(2, 8, 16),
            sharded=1,
            output_sharded=1,
            distributed=not local,
        )


def test_modules_outside_the_plan_stay_plain() -> None:
    with line_of(4) as mesh:
        plan = {"inner.up": ColwiseParallel(), "inner.down": RowwiseParallel()}
        parallelize = lambda m, mesh: parallelize_module(m, mesh, plan)  # noqa: E731
        follows_one_device(lambda: Half(Mlp()), parallelize, mesh, torch.randn(2, 7, 16))
