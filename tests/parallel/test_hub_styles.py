"""What the names of hub plans do: to modules, to parameters, to gradients; on local and distributed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import (
    DTensor,
    InterleavedShard,
    P,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError
from shardwise.experimental import implicit_replication
from shardwise.parallel import hub_plan, parallelize_module
from tests.parallel.models import first, line_of, made
from tests.processes.pool import on_processes

HEAD = 4


class Attention(nn.Module):
    """Attention as hubs write it: norms of heads, a sink for each head, fewer key heads than query heads."""

    def __init__(self, heads: int = 4, key_heads: int = 4) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = HEAD, heads // key_heads
        self.q_proj = nn.Linear(16, heads * HEAD)
        self.k_proj, self.v_proj = (nn.Linear(16, key_heads * HEAD) for _ in range(2))
        self.o_proj = nn.Linear(heads * HEAD, 16)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:-1], -1, HEAD) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)).softmax(-1) * self.sinks.view(1, -1, 1, 1).sigmoid()
        return self.o_proj((scores @ v).transpose(1, 2).flatten(2))


ATTENTION = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "q_norm": "replicated_with_grad_allreduce",
    "k_norm": "replicated_with_grad_allreduce",
    "sinks": "colwise",
    "o_proj": "rowwise",
}


class Experts(nn.Module):
    """Experts with a gate, on all tokens, and one that returns its input. A bias is not sharded."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.down_proj = nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.bias = nn.Parameter(torch.randn(16)) if bias else None
        self.identity = nn.Identity()

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,efh->tef", tokens, self.gate_up_proj).chunk(2, -1)
        every = torch.einsum("tef,ehf->teh", F.silu(gate) * up, self.down_proj)
        every = every if self.bias is None else every + self.bias
        chosen = F.one_hot(index, 5).to(tokens.dtype) * weights.unsqueeze(-1)
        routed = torch.einsum("teh,tke->th", every, chosen[..., :4])
        return routed + self.identity(tokens) * chosen[..., 4].sum(-1, keepdim=True)


class Mixture(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 5), Experts(bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 16)
        weights, index = self.gate(tokens).softmax(-1).topk(2, -1)
        return self.experts(tokens, index, weights).view(x.shape)


class LoopingExperts(Experts):
    """The same, one expert after the other, for those that some token chose: ranks with other tokens loop otherwise."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in index.unique().tolist():
            token, place = torch.where(index == expert)
            hidden = tokens[token]
            if expert == 4:
                hidden = self.identity(hidden)
            else:
                gate, up = F.linear(hidden, self.gate_up_proj[expert]).chunk(2, -1)
                hidden = F.linear(F.silu(gate) * up, self.down_proj[expert])
            result = result.index_add(0, token, hidden * weights[token, place, None])
        return result


class LoopingMixture(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = LoopingExperts()


FEATURES = {
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
    "experts.identity": "moe_identity_expert",
    "experts": "moe_tp_experts",
}
BY_EXPERT = {**FEATURES, "experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm"}
AS_ONE_BLOCK = {**FEATURES, "experts.gate_up_proj": "colwise"}


class Fused(nn.Module):
    """Gate and up in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Shared(nn.Module):
    """Parameters of its own, which ranks hold a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 8, 16)), nn.Parameter(torch.randn(2, 16, 8))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("bsh,efh->bsef", x, self.up)) * scale[..., None]
        return torch.einsum("bsef,ehf->bsh", hidden, self.down)


class WithShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shared = nn.Linear(16, 2), Shared()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x, scale=self.scale(x))


class Latent(nn.Module):
    """Multi-head latent attention's keys: a part that is projected further, and one that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_rope_head_dim = HEAD
        self.kv_a_proj_with_mqa, self.kv_a_norm = nn.Linear(16, 8 + HEAD), nn.RMSNorm(8)
        self.q_proj, self.kv_b_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.kv_a_proj_with_mqa(x).split([8, HEAD], -1)
        values = self.kv_b_proj(self.kv_a_norm(latent)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q = self.q_proj(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        mixed = (q @ (values + shared.unsqueeze(1)).transpose(2, 3)).softmax(-1) @ values
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


LATENT = {"kv_a_proj_with_mqa": "mla_kv_a_proj", "kv_b_proj": "colwise", "q_proj": "colwise", "o_proj": "rowwise"}

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "norms of heads": (Attention, ATTENTION),
    "two key heads": (lambda: Attention(4, 2), ATTENTION),
    "one key head": (lambda: Attention(4, 1), ATTENTION),
    "three key heads": (lambda: Attention(12, 3), ATTENTION),
    "experts by features": (Mixture, FEATURES),
    "experts by experts": (Mixture, BY_EXPERT),
    "gate and up as one block": (Mixture, AS_ONE_BLOCK),
    "a replicated bias": (lambda: Mixture(bias=True), FEATURES),
    "fused": (Fused, {"gate_up": "packed_colwise", "down": "rowwise"}),
    "summed": (WithShared, {"shared.up": "colwise", "shared.down": "rowwise", "shared": "all_reduce"}),
    "latent attention": (Latent, LATENT),
}

LOOPING = {"experts that loop": (LoopingMixture, FEATURES)}


@pytest.mark.parametrize("local", [True, False], ids=["local", "distributed"])
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["tp", "dp and tp"])
@pytest.mark.parametrize("name", CASES)
def test_follows_one_device(name: str, sizes: tuple[int, ...], local: bool) -> None:
    with simulate(4):
        follows_one_device(name, sizes, local)


@pytest.mark.parametrize(
    ("name", "local"), [("one key head", True), ("experts that loop", True), ("latent attention", False)]
)
@on_processes
def test_follows_one_device_on_processes(name: str, local: bool) -> None:
    for sizes in (4,), (2, 2):
        follows_one_device(name, sizes, local)


def follows_one_device(name: str, sizes: tuple[int, ...], local: bool) -> None:
    make, plan = {**CASES, **LOOPING}[name]
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1))
    alone, leaf = made(make), x.clone().requires_grad_()
    expected = alone(leaf)
    expected.square().mean().backward()
    with implicit_replication():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        model = parallelize_module(made(make), mesh, hub_plan(plan, use_local_output=local))
        if len(sizes) == 2 or not local:
            distribute_module(model, mesh["dp"] if local else mesh)
        mine: Any = x.clone()
        if len(sizes) == 2:
            mine = distribute_tensor(x, mesh["dp"], [Shard(0)]) if local else distribute_tensor(x, mesh, P("dp"))
        elif not local:
            mine = distribute_tensor(x, mesh, [Replicate()])
        mine.requires_grad_()
        found = model(mine)
        torch.testing.assert_close(first(found), expected.detach())
        found.square().mean().backward()
        torch.testing.assert_close(first(mine.grad), leaf.grad)
        for (path, parameter), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
            for shard in every(parameter.grad):
                torch.testing.assert_close(shard, plain.grad, msg=lambda text, path=path: f"{path}: {text}")


def every(tensor: Tensor) -> list[Tensor]:
    """The global value that each rank sees."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return list(getattr(tensor, "shards", [tensor]))


def test_where_parameters_are() -> None:
    with line_of(4) as mesh:
        attention = parallelize_module(Attention(), mesh, ATTENTION)
        assert attention.sinks.placements == (Shard(0),)
        assert attention.q_norm.weight.placements == (Replicate(),)
        mixture = parallelize_module(Mixture(), mesh, FEATURES)
        assert mixture.experts.gate_up_proj.placements == (InterleavedShard(1, 2),)
        assert mixture.experts.down_proj.placements == (Shard(2),)
        by_expert = parallelize_module(Mixture(), mesh, BY_EXPERT)
        assert by_expert.experts.down_proj.placements == (Shard(0),)
        assert isinstance(attention.sinks, nn.Parameter)


def test_experts_by_features_communicate_once() -> None:
    with line_of(4) as mesh:
        mixture = parallelize_module(made(Mixture), mesh, FEATURES)
        x = distribute_tensor(torch.randn(2, 3, 16), mesh, [Replicate()]).to_local()
        with CommDebugMode() as comm:
            mixture(x)
        assert comm.get_total_counts() == 1


def test_parameters_are_put_back_after_an_error() -> None:
    with line_of(4) as mesh:
        for make, plan in ((Attention, ATTENTION), (Mixture, FEATURES)):
            model = parallelize_module(made(make), mesh, plan)
            with pytest.raises(RuntimeError):
                model(torch.randn(2, 3, 5))
            assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_names_that_do_not_fit() -> None:
    with line_of(4) as mesh:
        with pytest.raises(
            InputError, match=r"parameter 'sinks': the style 'rowwise_rep' is for modules: for parameters"
        ):
            parallelize_module(Attention(), mesh, {"sinks": "rowwise_rep"})
        with pytest.raises(
            InputError, match="module 'q_proj': the style 'grouped_gemm' is for parameters: for modules"
        ):
            parallelize_module(Attention(), mesh, {"q_proj": "grouped_gemm"})
        with pytest.raises(
            InputError, match=r"the 6 query heads of a Attention cannot be divided among 4 ranks, .*hub_plan"
        ):
            parallelize_module(Attention(6, 2), mesh, ATTENTION)
        with pytest.raises(InputError, match="needs the attribute qk_rope_head_dim"):
            parallelize_module(Attention(), mesh, {"k_proj": "mla_kv_a_proj"})
