"""Every module of PyTorch's module database, its parameters and inputs sharded at random: the one-device answer.

A few samples of each; SHARDWISE_ALL_MODULES=1 takes all of them, on both meshes and with several placements.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

import shardwise
from tests.nn.compare import compare
from tests.ops.helpers import ranks

# PyTorch's own: of sizes that broadcast, of nested tensors. An op without a rule is an error all the same.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GATHERED = {"nn_CTCLoss"}  # its op looks along all dims, and the size of what it saves depends on data
ALL = os.environ.get("SHARDWISE_ALL_MODULES") == "1"
MODULES = {info.formatted_name: info for info in module_db}
MESHES = ((2, 2), (4,))
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-6, "atol": 1e-8},
    torch.float32: {"rtol": 1e-3, "atol": 1e-4},
}


def samples(info: ModuleInfo, dtype: torch.dtype) -> Iterator[tuple[nn.Module, ModuleInput]]:
    """Modules, in training and in use where that differs, and their inputs."""
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        every = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        inputs = [given for given in every if given.forward_input is not None]
        for given in inputs if ALL else random.Random(0).sample(inputs, min(2, len(inputs))):
            how = given.constructor_input
            yield info.module_cls(*how.args, **how.kwargs).to(dtype).train(training), given


def cases(number: int) -> list[tuple[tuple[int, ...], int]]:
    """Meshes and seeds of placements for a sample."""
    if ALL:
        return [(sizes, seed) for sizes in MESHES for seed in range(3)]
    return [(MESHES[number % 2], number)]


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    dtype = torch.float64
    for number, (module, given) in enumerate(samples(MODULES[name], dtype)):
        inputs: Any = given.forward_input
        for sizes, seed in cases(number):
            strict = nullcontext() if name in GATHERED else shardwise.strict_ops()
            with ranks(*sizes) as mesh, strict:
                compare(module, inputs.args, inputs.kwargs, mesh, seed, **CLOSE[dtype])


@pytest.mark.parametrize("name", ["nn_Linear", "nn_LayerNorm", "nn_Conv2d", "nn_BatchNorm2d", "nn_LSTM"])
def test_modules_in_single_precision(name: str) -> None:
    module, given = next(samples(MODULES[name], torch.float32))
    inputs: Any = given.forward_input
    with ranks(2, 2) as mesh:
        compare(module, inputs.args, inputs.kwargs, mesh, 5, **CLOSE[torch.float32])
