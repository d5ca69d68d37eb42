"""An optimizer that was made before a module was distributed goes on with the distributed parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, P, Replicate, Shard, distribute_module, distribute_tensor, shard_parameters
from shardwise.errors import InputError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.nn.test_ties import IDS, Tied, replaced, train
from tests.ops.helpers import ranks

Way = Callable[[nn.Module, DeviceMesh], nn.Module]
WAYS: dict[str, Way] = {
    "distribute_module": distribute_module,
    "partition_fn": lambda model, mesh: distribute_module(
        model, mesh, lambda name, module, mesh: replaced(module, mesh, [Shard(0)])
    ),
    "shard_parameters": lambda model, mesh: shard_parameters(model, mesh, P("a")),
    "parallelize_module": lambda model, mesh: distribute_module(
        parallelize_module(
            model,
            mesh,
            {"body.0": ColwiseParallel(use_local_output=False), "body.2": RowwiseParallel(use_local_output=False)},
        ),
        mesh,
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("begun", [False, True], ids=["new", "with state"])
def test_it_goes_on(way: str, kind: str, begun: bool) -> None:
    def run(distribute: Way | None, ids: Tensor, mesh: Any = None) -> list[Tensor]:
        model = Tied()
        optimizer = OPTIMIZERS[kind](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if begun:
            train(model, IDS, optimizer)
            schedule.step()
        if distribute is not None:
            distribute(model, mesh)
        found = train(model, ids, optimizer)
        assert distribute is None or all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
        assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
        return found

    with ranks(2) as mesh:
        found = run(WAYS[way], distribute_tensor(IDS, mesh, [Replicate()]), mesh)
    torch.testing.assert_close(found, run(None, IDS), rtol=1e-4, atol=1e-5)


def test_plain_parameters_that_are_still_in_use_stay() -> None:
    shared = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([shared], lr=1.0)
    with ranks(2) as mesh:
        module = nn.ParameterDict({"weight": shared})
        distribute_module(module, mesh)
        shared.sum().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["params"][0] is shared
        torch.testing.assert_close(shared.detach(), torch.zeros(4))
        module["weight"].sum().backward()
        with pytest.raises(InputError, match="make the optimizer after"):
            optimizer.step()
