"""What tests of experts share: a mixture on one device and in parallel, comparisons, a training loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from shardwise import (
    DeviceMesh,
    DTensor,
    Shard,
    distribute_module,
    distribute_tensor,
)
from shardwise.parallel import ExpertParallel, parallelize_module
from shardwise.world import RankTensor
from tests.parallel.mixtures import Mixture

FEATURES = {"w1": Shard(1), "w3": Shard(1), "w2": Shard(2)}


def made(kind: str, **sizes: int) -> Mixture:
    torch.manual_seed(0)
    return Mixture(kind, **sizes)


def loss_of(outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    out, balance, z = outputs
    return out.square().mean() + 0.1 * balance + 0.01 * z


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.shards[0] if isinstance(tensor, RankTensor) else tensor


def by_name(model: nn.Module, value: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A value for each parameter, those of stacked lists under the names of the list."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        before, stacked, after = name.partition("stacked.")
        if stacked:
            found |= {f"{before}{index}.{after}": own for index, own in enumerate(value(parameter))}
        else:
            found[name] = value(parameter)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def parallel(model: Mixture, mesh: DeviceMesh, style: ExpertParallel | None = None) -> Mixture:
    """The mixture with its experts sharded and its router replicated."""
    parallelize_module(model, mesh, {"experts": style or ExpertParallel()})
    distribute_module(model, mesh)
    return model


def on_ranks(tensors: list[Tensor], grad: bool = False) -> RankTensor:
    return RankTensor(tensors, requires_grad=grad)


class Network(nn.Module):
    """Two mixtures with residual connections, between two linears."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.mixtures = nn.ModuleList(Mixture(kind) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, extra = self.first(x), 0.0
        for mixture in self.mixtures:
            out, balance, z = mixture(x)
            x, extra = x + out, extra + 0.05 * balance + 0.01 * z
        return self.last(x), extra


def batch(step: int) -> tuple[Tensor, Tensor]:
    """29 tokens: ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(29, 8, generator=generator), torch.randn(29, 4, generator=generator)


def trained(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[float]:
    """Eight steps of AdamW with clipping; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(8):
        x, target = map(place, batch(step))
        out, extra = model(x)
        loss = nn.functional.mse_loss(out, target) + extra
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(whole(loss)))
    return losses


def network(kind: str) -> Network:
    torch.manual_seed(0)
    return Network(kind)


def training_follows_one_device(kind: str, mesh: DeviceMesh) -> None:
    alone, model = network(kind), network(kind)
    expected = trained(alone, lambda t: t)
    parallelize_module(model, mesh, {"mixtures.*.experts": ExpertParallel()})
    distribute_module(model, mesh)
    found = trained(model, lambda t: distribute_tensor(t, mesh, [Shard(0)] * mesh.ndim))
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0]
    assert_same(by_name(model, whole), by_name(alone, lambda p: p.detach()), 1e-4)
