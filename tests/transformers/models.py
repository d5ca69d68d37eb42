"""Tiny random models of transformers, built from their configurations, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

VOCAB = 64
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER: dict[str, Any] = {
    **_SIZES,
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def _llama() -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_DECODER, tie_word_embeddings=False))


def _qwen3() -> nn.Module:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DECODER, head_dim=8, tie_word_embeddings=True))


def _mixtral() -> nn.Module:
    return tf.MixtralForCausalLM(tf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2))


def _gemma() -> nn.Module:
    return tf.GemmaForCausalLM(tf.GemmaConfig(**_DECODER, head_dim=8))


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0))


def _t5() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, decoder_start_token_id=0))


def _mamba() -> nn.Module:
    config = tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0)
    return tf.MambaForCausalLM(config)


def _vit() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**_SIZES, image_size=16, patch_size=4, num_labels=7))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "t5": _t5,
    "mamba": _mamba,
    "vit": _vit,
}


def _decoder(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    """A decoder whose classes are called `kind + ...`, with the usual names of sizes."""
    model, config = getattr(tf, f"{kind}ForCausalLM"), getattr(tf, f"{kind}Config")
    return lambda: model(config(**{**_DECODER, **changes}))


def _gemma3() -> nn.Module:
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_DECODER, head_dim=8, sliding_window=4))


def _gptneox() -> nn.Module:
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_SIZES, vocab_size=VOCAB, max_position_embeddings=64))


def _opt() -> nn.Module:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.OPTConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=64, word_embed_proj_dim=32)
    return tf.OPTForCausalLM(config)


def _falcon() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tf.FalconForCausalLM(tf.FalconConfig(**sizes, vocab_size=VOCAB, alibi=False, new_decoder_architecture=False))


def _bloom() -> nn.Module:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))


def _bart() -> nn.Module:
    half = {"layers": 2, "ffn_dim": 48, "attention_heads": 4}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in half.items()}
    config = tf.BartConfig(**sizes, vocab_size=VOCAB, d_model=32, max_position_embeddings=64)
    return tf.BartForConditionalGeneration(config)


def _bert() -> nn.Module:
    return tf.BertForMaskedLM(tf.BertConfig(**_SIZES, vocab_size=VOCAB, max_position_embeddings=64))


def _electra() -> nn.Module:
    config = tf.ElectraConfig(**_SIZES, vocab_size=VOCAB, embedding_size=32, max_position_embeddings=64)
    return tf.ElectraForMaskedLM(config)


def _mamba2() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2}
    return tf.Mamba2ForCausalLM(tf.Mamba2Config(**sizes, vocab_size=VOCAB, chunk_size=4))


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

FURTHER: dict[str, Callable[[], nn.Module]] = {
    "qwen2": _decoder("Qwen2"),
    "mistral": _decoder("Mistral", sliding_window=4),
    "phi3": _decoder("Phi3"),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=4),
    "gemma3": _gemma3,
    "olmo2": _decoder("Olmo2"),
    "qwen3moe": _decoder("Qwen3Moe", head_dim=8, num_experts=4, **_EXPERTS),
    "gpt_oss": _decoder("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "deepseek": _decoder("DeepseekV3", num_key_value_heads=4, **_LATENT, **_GROUPS, **_EXPERTS),
    "gptneox": _gptneox,
    "opt": _opt,
    "falcon": _falcon,
    "bloom": _bloom,
    "bart": _bart,
    "bert": _bert,
    "electra": _electra,
    "mamba2": _mamba2,
}
"""More architectures, for the table."""


def make(name: str) -> nn.Module:
    """The model, with the same random weights every time. Weights are large enough for logits to differ."""
    torch.manual_seed(0)
    model = {**MODELS, **FURTHER}[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    config = getattr(model, "generation_config", None)
    if config is not None:
        config.eos_token_id = None  # every sequence has the asked length
    return model


def batch_of(name: str) -> dict[str, Tensor]:
    """Inputs for training."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(4, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(7, (4,), generator=generator)}
    ids = torch.randint(1, VOCAB, (4, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1) if name in ("t5", "bart") else ids}
