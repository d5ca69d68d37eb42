"""Models of transformers, sharded by the plans that their configurations hold, follow one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    DeviceMesh,
    DTensor,
    P,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.experimental import implicit_replication
from shardwise.parallel import hub_plan, parallelize_module

transformers = pytest.importorskip("transformers")

# Plans name modules that a model may lack: dense layers where all have experts.
pytestmark = pytest.mark.filterwarnings("ignore:the plan's .* matches no module")

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, two key heads": ("Llama", {"num_key_value_heads": 2}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", EXPERTS),
    "gemma": ("Gemma", {}),
    "gemma3": ("Gemma3Text", {}),
    "deepseek v3": ("DeepseekV3", {**EXPERTS, **LATENT}),
    "deepseek v2": ("DeepseekV2", {**EXPERTS, **LATENT}),
    "llama4": ("Llama4Text", {**EXPERTS, "intermediate_size_mlp": 32, "num_experts_per_tok": 1}),
    "gpt oss": ("GptOss", {**EXPERTS, "layer_types": ["full_attention", "sliding_attention"]}),
    "granite with sinks": (
        "GraniteSWA",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "num_key_value_heads": 2},
    ),
    "longcat": (
        "LongcatFlash",
        {
            **EXPERTS,
            **LATENT,
            "num_layers": 1,
            "num_hidden_layers": 2,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 3,
            "zero_expert_num": 2,
            "qk_head_dim": 8,
        },
    ),
    "inkling": ("InklingText", {**EXPERTS, "n_shared_experts": 2, "num_hidden_layers": 1}),
}


def make(name: str) -> nn.Module:
    """A tiny random model, in double precision and the same each time."""
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # norms, biases and zeros too
    return model.train()


def tokens(batch: int = 4) -> Tensor:
    return torch.randint(3, 48, (batch, 6), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, ids: Tensor, after: Callable[[nn.Module], None] = lambda model: None) -> list[float]:
    """Three steps of AdamW on next tokens; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(3):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            after(model)
        optimizer.step()
        losses.append(float(whole(loss.detach())))
    return losses


def whole(tensor: Tensor) -> Tensor:
    """The global value; ranks must agree on a plain one."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    shards = getattr(tensor, "shards", None)
    if shards is None:
        return tensor
    for shard in shards[1:]:
        torch.testing.assert_close(shard, shards[0])
    return shards[0]


MESHES = {"tp": ((4,), ("tp",)), "dp and tp": ((2, 2), ("dp", "tp"))}


@contextmanager
def mesh_of(name: str) -> Iterator[DeviceMesh]:
    with simulate(4), implicit_replication():
        sizes, names = MESHES[name]
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)


def placed(ids: Tensor, mesh: DeviceMesh, local: bool) -> Tensor:
    """Token ids as a program with local or distributed outputs passes them."""
    if mesh.ndim == 2:
        return distribute_tensor(ids, mesh["dp"], [Shard(0)]) if local else distribute_tensor(ids, mesh, P("dp"))
    return ids if local else distribute_tensor(ids, mesh, [Replicate()])


_REFERENCE: dict[str, tuple[list[float], dict[str, Tensor], dict[str, Tensor]]] = {}


def reference(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, first gradients and final parameters on one device."""
    if name not in _REFERENCE:
        model, gradients = make(name), {}

        def keep(model: nn.Module) -> None:
            gradients.update({n: copy.copy(p.grad) for n, p in model.named_parameters()})

        losses = train(model, tokens(), keep)
        _REFERENCE[name] = losses, gradients, dict(model.named_parameters())
    return _REFERENCE[name]


# Longcat's experts loop over those that a rank's tokens chose, and simulated ranks must agree on such loops.
# Inkling's loop, on distributed tensors, is slow.
LEFT_OUT = {("longcat", "dp and tp"), ("inkling", "dp and tp")}
RUNS = [(name, mesh) for name in MODELS for mesh in MESHES if (name, mesh) not in LEFT_OUT]


@pytest.mark.parametrize("local", [True, False], ids=["local", "distributed"])
@pytest.mark.parametrize(("name", "mesh_name"), RUNS)
def test_three_steps(name: str, mesh_name: str, local: bool) -> None:
    three_steps(name, mesh_name, local, lambda model: model.tp_plan)


@pytest.mark.parametrize("local", [True, False], ids=["local", "distributed"])
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", ["qwen3 moe", "mixtral"])
def test_experts_are_sharded_by_expert(name: str, mesh_name: str, local: bool) -> None:
    three_steps(name, mesh_name, local, lambda model: {**model.tp_plan, **model.ep_plan})


def three_steps(name: str, mesh_name: str, local: bool, plan_of: Callable[[Any], dict[str, str]]) -> None:
    losses, gradients, parameters = reference(name)
    with mesh_of(mesh_name) as mesh:
        model = make(name)
        parallelize_module(model, mesh, hub_plan(plan_of(model), use_local_output=local))
        if not local or mesh.ndim == 2:
            distribute_module(model, mesh if not local else mesh["dp"])

        def same_gradients(model: nn.Module) -> None:
            for n, parameter in model.named_parameters():
                close(None if parameter.grad is None else whole(parameter.grad), gradients[n], n)

        found = train(model, placed(tokens(), mesh, local), same_gradients)
        assert found == pytest.approx(losses, rel=1e-4)
        for n, parameter in model.named_parameters():
            close(whole(parameter), parameters[n].detach(), n, atol=2e-3)


def close(found: Tensor | None, expected: Tensor | None, name: str, atol: float = 1e-5) -> None:
    assert (found is None) == (expected is None), name
    if found is not None:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=atol, msg=lambda text: f"{name}: {text}")
