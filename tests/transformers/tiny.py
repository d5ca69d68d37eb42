"""Tiny random models of transformers, ways to distribute them, and what they compute: compared with one device.

    python -m tests.transformers.tiny                     # every model in every way: a table, and counts

A way distributes a model: `WAYS[way](model, mesh)`. A task runs one and returns values: `TASKS[task](model, batch)`.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import (
    DTensor,
    P,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    shard_parameters,
    simulate,
)
from shardwise.experimental import implicit_replication
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.world import common

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


def make(name: str) -> nn.Module:
    """The model, with the same random weights every time. Weights are large enough for logits to differ."""
    torch.manual_seed(0)
    model = MODELS[name]()
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
    return {"input_ids": ids, "labels": ids.flip(1) if name == "t5" else ids}


# ---- ways to distribute a model -------------------------------------------------------------------------------------


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every parameter on every rank."""
    return distribute_module(model, mesh)


def by_parameter(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Matrices sharded in one dim over tp and in the other over dp, by name; vectors over all ranks."""

    def placements(name: str, parameter: Tensor) -> list[Placement]:
        if parameter.dim() < 2:
            return [Shard(0), Shard(0)] if parameter.dim() else [Replicate(), Replicate()]
        rowwise = any(word in name for word in ("down", "o_proj", "wo.", "c_proj"))
        return [Shard(0), Shard(1)] if rowwise else [Shard(1), Shard(0)]

    return shard_parameters(model, mesh, placements)


def mixed(model: nn.Module, mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    """Each parameter sharded in any dim over any axis, or not, at random."""
    rng = random.Random(seed)
    chosen: dict[int, list[Placement]] = {}

    def placements(name: str, parameter: Tensor) -> list[Placement]:
        if id(parameter) not in chosen:  # a shared one is asked for under all its names
            choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(parameter.dim()))]
            chosen[id(parameter)] = [rng.choice(choices) for _ in range(mesh.ndim)]
        return chosen[id(parameter)]

    return shard_parameters(model, mesh, placements)


_COLWISE = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "q",
    "k",
    "v",
    "wi",
    "lm_head",
    "in_proj",
    "query",
    "key",
    "value",
    "intermediate.dense",
    "fc1",
)
_ROWWISE = ("o_proj", "down_proj", "o", "wo", "out_proj", "output.dense", "fc2", "shared", "embed_tokens", "wte")


def styled(model: nn.Module, mesh: DeviceMesh, local: bool = False) -> nn.Module:
    """Linears column-wise and row-wise by name, embeddings by vocabulary, the rest replicated."""
    plan = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            if path.endswith(tuple(f".{name}" for name in _COLWISE)) or path in _COLWISE:
                plan[path] = ColwiseParallel(use_local_output=local)
            elif path.endswith(tuple(f".{name}" for name in _ROWWISE)) or path in _ROWWISE:
                plan[path] = RowwiseParallel(use_local_output=local)
    assert plan, [path for path, module in model.named_modules()]
    parallelize_module(model, mesh, plan)
    return distribute_module(model, mesh)


WAYS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "replicated": replicated,
    "by parameter": by_parameter,
    "mixed": mixed,
    "mixed 1": lambda model, mesh: mixed(model, mesh, 1),
    "styles": styled,
}


@contextmanager
def world(sizes: tuple[int, ...] = (2, 2)) -> Iterator[DeviceMesh]:
    """A simulated mesh with the axes dp and tp, or tp alone."""
    ranks = 1
    for size in sizes:
        ranks *= size
    with simulate(ranks):
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


# ---- tasks ----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value on one device, of a distributed or simulated tensor."""
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()
    return common(value.detach()) if isinstance(value, Tensor) else value


def train(model: nn.Module, batch: dict[str, Tensor], steps: int = 3) -> dict[str, Tensor]:
    """The losses of three AdamW steps, and all parameters after them."""
    model.train()
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # gradients near 0 do not become noise
    found = {}
    for step in range(steps):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = plain(loss)
    for name, parameter in model.named_parameters():
        found[name] = plain(parameter)
    return found


def _generating(**options: Any) -> Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]:
    def generate(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Six new tokens for two prompts."""
        model.eval()
        torch.manual_seed(3)
        with torch.no_grad():
            given = batch["input_ids"][:2, :4]
            return {"tokens": plain(model.generate(given, max_new_tokens=6, min_new_tokens=6, **options))}

    return generate


def checkpointing(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A step with activation checkpointing."""
    model.gradient_checkpointing_enable()
    return train(model, batch, steps=1)


def resizing(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A step with a larger vocabulary."""
    torch.manual_seed(4)
    model.resize_token_embeddings(VOCAB + 6)
    return train(model, batch, steps=1)


TASKS: dict[str, Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]] = {
    "train": train,
    "checkpointing": checkpointing,
    "resizing": resizing,
    "dp prompts": _generating(do_sample=False),
    "greedy": _generating(do_sample=False),
    "static cache": _generating(do_sample=False, cache_implementation="static"),
    "sampling": _generating(do_sample=True, top_k=10, temperature=0.8),
    "beams": _generating(do_sample=False, num_beams=3),
}


def tasks_of(name: str) -> list[str]:
    """The tasks that a model has: a classifier generates nothing, and a state-space model has no key/value cache."""
    if name == "vit":
        return ["train", "checkpointing"]
    return [task for task in TASKS if not (name == "mamba" and task == "static cache")]


_expected: dict[tuple[str, str], dict[str, Tensor]] = {}


def expected(name: str, task: str) -> dict[str, Tensor]:
    """What one device computes."""
    if (name, task) not in _expected:
        _expected[name, task] = TASKS[task](make(name), batch_of(name))
    return _expected[name, task]


_SHARDED_BATCH = ("train", "checkpointing", "resizing", "dp prompts")


def on_mesh(name: str, way: str, task: str, mesh: DeviceMesh) -> dict[str, Tensor]:
    """What a mesh computes. Batches for training are sharded over dp; prompts are plain but for one task."""
    model = WAYS[way](make(name), mesh)
    batch: Any = batch_of(name)
    if task in _SHARDED_BATCH:
        rows = P("dp") if "dp" in (mesh.mesh_dim_names or ()) else P()
        batch = {key: distribute_tensor(value, mesh, rows) for key, value in batch.items()}
    with implicit_replication():
        return TASKS[task](model, batch)


def found(name: str, way: str, task: str, sizes: tuple[int, ...] = (2, 2)) -> dict[str, Tensor]:
    """What a simulated mesh computes."""
    with world(sizes) as mesh:
        return on_mesh(name, way, task, mesh)


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Fail unless all values agree, up to the order of sums."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def check(name: str, way: str, task: str, sizes: tuple[int, ...] = (2, 2)) -> None:
    """Fail unless a mesh computes what one device does."""
    compare(found(name, way, task, sizes), expected(name, task))


# ---- the table ------------------------------------------------------------------------------------------------------


def _verdict(name: str, way: str, task: str) -> tuple[str, str]:
    try:
        check(name, way, task)
    except AssertionError as error:
        return "wrong", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    return "right", ""


def main() -> None:
    """Print a line for each model, way and task, and the counts."""
    counts: Counter[str] = Counter()
    asked = set(sys.argv[1:])
    for name in MODELS:
        for way in WAYS:
            for task in tasks_of(name):
                if asked and not asked & {name, way, task}:
                    continue
                begin = time.perf_counter()
                with warnings.catch_warnings() if asked else nullcontext():
                    verdict, text = _verdict(name, way, task)
                counts[verdict] += 1
                took = time.perf_counter() - begin
                print(f"{name:9}{way:14}{task:14}{verdict:6} {took:5.1f} s  {text[:300]}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
