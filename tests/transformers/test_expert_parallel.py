"""Mixtures of transformers whose experts are sharded, and whose tokens travel to them, follow one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import Shard, distribute_module, distribute_tensor
from shardwise.experimental import implicit_replication
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.transformers.test_hub_plans import close, make, tokens, whole
from tests.worlds import mesh_of

MODELS = ["mixtral", "gpt oss"]


def trained(model: nn.Module, ids: torch.Tensor) -> list[float]:
    """Three steps of AdamW on next tokens, with the loss that balances the experts' load."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(3):
        found = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
        assert found.aux_loss > 0
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
        losses.append(float(whole(found.loss)))
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_three_steps(name: str) -> None:
    alone = make(name)
    expected = trained(alone, tokens())
    with mesh_of(2, 2, names=("dp", "ep")) as mesh, implicit_replication():
        model = make(name)
        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
        distribute_module(model, mesh)
        found = trained(model, distribute_tensor(tokens(), mesh, [Shard(0), Shard(0)]))
        assert found == pytest.approx(expected, rel=1e-4)
        for one, (path, parameter) in zip(alone.parameters(), model.named_parameters(), strict=True):
            close(whole(parameter), one.detach(), path, atol=2e-3)
