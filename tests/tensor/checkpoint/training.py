"""A model and its optimizer: what a training program saves, and goes on with on another mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from shardwise import DTensor, Placement, Replicate, Shard, distribute_tensor
from shardwise.world import common
from tests.training.models import loss_of, network, placed

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: optim.AdamW(params, lr=0.05, foreach=True, amsgrad=True),
    "fused Adam": lambda params: optim.Adam(params, lr=0.05, fused=True),
    "SGD": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.05),
}


class Training:
    """A placed model and its optimizer. Every mesh cuts parameters in another way."""

    def __init__(self, mesh: DeviceMesh, kind: str) -> None:
        self.mesh = mesh
        self.model = placed(network(dtype=torch.float32), mesh, self.placing)
        self.optimizer: optim.Optimizer = OPTIMIZERS[kind](self.model.parameters())

    def placing(self, name: str) -> list[Placement]:
        cut: Placement = Shard(0) if self.mesh.ndim == 1 or "weight" in name else Replicate()
        return [cut, *[Shard(0)] * (self.mesh.ndim - 1)]

    def loss(self) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        inputs = torch.randn(6, 6, generator=generator)
        return loss_of(self.model, distribute_tensor(inputs, self.mesh, [Replicate()] * self.mesh.ndim))

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def wholes(state: dict[str, Any]) -> dict[str, Any]:
    """Every value of a state, on one device."""
    paths, _ = pytree.tree_flatten_with_path(state)
    return {
        pytree.keystr(path): common(v.detach().full_tensor()).clone() if isinstance(v, DTensor) else v
        for path, v in paths
    }


def assert_bitwise(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same values, to the last bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        assert same, name
