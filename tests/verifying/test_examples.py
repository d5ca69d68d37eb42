"""The example programs compute on ranks what they compute on one device."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import P

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    """Import an example program, without running it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def letters_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def clipped_step(model, batch, mesh, optimizer):
    loss = letters_loss(model(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_train(dropout):
    train = load("train")
    report = shardwise.verify(
        lambda: train.GPT(width=16, heads=4, layers=2, length=12, dropout=dropout),
        train.distribute,
        train.batches(1, 5, 12)[0],
        step=clipped_step,
        optimizer=adamw,
        place=P("dp"),
        mesh=(2, 4),
        names=("dp", "tp"),
        steps=2,
    )
    assert report.ok, str(report)


def llama_options(**changed) -> argparse.Namespace:
    defaults = {"width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "experts": 0, "length": 8, "rows": 5, "steps": 1}
    return argparse.Namespace(**defaults | changed)


@pytest.mark.parametrize(("sizes", "experts"), [((1, 2, 2, 2), 0), ((2, 1, 2, 2), 4)], ids=["dense", "experts"])
def test_llama(sizes, experts):
    llama = load("llama")
    options = llama_options(experts=experts)
    report = shardwise.verify(
        lambda: llama.Llama(options),
        lambda model, mesh: llama.parallelize(model, mesh, options),
        llama.batches(options, "cpu")[0],
        step=clipped_step,
        optimizer=adamw,
        place=lambda batch, mesh: tuple(llama.place(x, mesh) for x in batch),
        mesh=sizes,
        names=llama.AXES,
        steps=2,
    )
    assert report.ok, str(report)
