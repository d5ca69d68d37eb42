"""Ways to distribute a model of transformers, and what it computes: compared with one device.

A way distributes a model: `WAYS[way](model, mesh)`. A task runs one and returns values: `TASKS[task](model, batch)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
from tests.transformers.models import VOCAB, batch_of, make

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
    """The tasks that a model has: encoders generate nothing, and state-space models have no key/value cache."""
    if name in ("vit", "bert", "electra"):
        return ["train", "checkpointing"]
    return [task for task in TASKS if not (name in ("mamba", "mamba2") and task == "static cache")]


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
