"""Data, context and tensor parallel together: a model trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.nn import attention_over_sequence
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.worlds import mesh_of

HEADS, WIDTH, VOCABULARY = 4, 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = HEADS * WIDTH
        self.norm = nn.LayerNorm(features)
        self.q, self.k, self.v, self.out = (nn.Linear(features, features, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(VOCABULARY, HEADS * WIDTH), Block()
        self.output = nn.Linear(HEADS * WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.output(checkpoint(self.block, self.tokens(tokens), use_reentrant=False))
        return result


def losses(model: Model, place: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    torch.manual_seed(1)
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (3, 21), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(place(tokens)).flatten(0, 1), place(tokens.roll(-1, 1)).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return found


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize(("method", "exchanges"), [("ring", 1), ("heads", 4)])
def test_training_over_three_axes_equals_one_device(method: Any, exchanges: int) -> None:
    expected, model = losses(make_model(), lambda tensor: tensor), make_model()
    colwise, rowwise = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    plan = {f"block.{name}": colwise for name in ("q", "k", "v", "up")} | {
        f"block.{name}": rowwise for name in ("out", "down")
    }
    with mesh_of(2, 2, 2, names=("dp", "cp", "tp")) as mesh, attention_over_sequence(method):

        def place(tensor: Tensor) -> DTensor:
            return distribute_tensor(tensor, mesh, [Shard(0), Shard(1), Replicate()])

        parallelize_module(model, mesh, plan)
        distribute_module(model, mesh)
        assert losses(model, place) == pytest.approx(expected, abs=1e-4)
        tokens = place(torch.zeros(3, 21, dtype=torch.int64))
        with CommDebugMode() as counted:
            model(tokens)
        counts = {str(op).partition(".")[2]: count for op, count in counted.get_comm_counts().items()}
        assert counts == {"all_to_all_single": exchanges, "all_reduce": 2}
