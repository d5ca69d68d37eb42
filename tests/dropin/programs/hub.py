"""transformers with tp_plan="auto": load, train, generate, save; compared with one device."""

from functools import partial

import checks
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GemmaConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "Llama": LlamaConfig(**SIZES, head_dim=8),
    "Qwen3": Qwen3Config(**SIZES, head_dim=8),
    "Mixtral": MixtralConfig(**SIZES, head_dim=8, num_local_experts=4),
    "Gemma": GemmaConfig(**SIZES, head_dim=8),
    "DeepSeek V3": DeepseekV3Config(
        **SIZES,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def step(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run(name, folder):
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder / "before")
    dist.barrier()
    reference = AutoModelForCausalLM.from_pretrained(folder / "before", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / "before", tp_plan="auto", dtype=torch.float32)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (2, 8))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for _ in range(3):
        found, expected = (step(m, o, ids) for m, o in zip((model, reference), optimizers, strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    assert torch.equal(model.generate(ids[:, :4], **options), reference.generate(ids[:, :4], **options))
    model.save_pretrained(folder / "after")
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(folder / "after", dtype=torch.float32)
    for (key, found), expected in zip(saved.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=lambda m, k=key: f"{name} {k}: {m}")


if __name__ == "__main__":
    checks.run({f"{name}: load, train, generate, save": partial(run, name) for name in CONFIGS})
