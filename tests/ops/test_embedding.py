"""Embeddings whose backward pass knows the table: the gradient is summed where that moves the fewest bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.debug import CommDebugMode
from shardwise.experimental import implicit_replication
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.ops.helpers import check_case, on, r, ranks, whole
from tests.parallel.models import counts
from tests.processes.pool import on_processes

ROWS, WIDTH = 2000, 32
TOKENS = torch.randint(0, ROWS, (4, 8), generator=torch.Generator().manual_seed(0))
SMALL = TOKENS.numel() * WIDTH * 4
"""The bytes of the looked-up rows; the table has 60 times as many."""


def embedded(weight: Tensor, tokens: Tensor = TOKENS, **options: Any) -> Tensor:
    return F.embedding(tokens, weight, **options)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_one_device_answer(options: dict[str, Any]) -> None:
    tokens = TOKENS % 10
    check_case(lambda w, t: F.embedding(t, w, **options), (r(10, 6), tokens), limit=16)
    check_case(lambda w, t: F.embedding(t, w, **options), (r(11, 5), tokens[:3, 0]), limit=16)


@pytest.mark.parametrize(
    ("table", "received"),
    [([Replicate()], 2 * SMALL * 3 // 4), ([Shard(0)], 2 * SMALL * 3 // 4), ([Shard(1)], SMALL * 3 // 4)],
)
def test_a_partial_gradient_is_summed_before_it_becomes_as_large_as_the_table(
    table: list[Placement], received: int
) -> None:
    data = r(ROWS, WIDTH)
    gradient = r(*TOKENS.shape, WIDTH, seed=1)
    (expected,) = torch.autograd.grad(embedded(data.requires_grad_()), data, gradient)
    with ranks(4) as mesh:
        weight = distribute_tensor(data.detach(), mesh, table).requires_grad_()
        result = embedded(weight, distribute_tensor(TOKENS, mesh, [Replicate()]))
        partial = on(mesh, gradient, Partial())
        with CommDebugMode() as comm:
            result.backward(partial)
        assert comm.get_total_bytes() == received
        assert weight.grad is not None
        assert weight.grad.placements == tuple(table)  # type: ignore[attr-defined]
        torch.testing.assert_close(whole(weight.grad), expected)  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(self.embedding(tokens))))
        return result


def check_model(mesh: Any, distributed_tokens: bool) -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    plain(TOKENS).square().sum().backward()
    table = nn.Parameter(distribute_tensor(model.embedding.weight.detach(), mesh, [Replicate()]))
    model.embedding.weight = table
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, styles)
    tokens = distribute_tensor(TOKENS, mesh, [Replicate()]) if distributed_tokens else TOKENS
    with implicit_replication():
        result = model(tokens)
    loss = result.square().sum()
    with CommDebugMode() as comm:
        loss.backward()
    assert counts(comm) == {"all_reduce": 1}
    assert comm.get_total_bytes() <= 2 * SMALL
    found = shardwise.world.common(table.grad.full_tensor())  # type: ignore[union-attr]
    torch.testing.assert_close(found, plain.embedding.weight.grad)


@pytest.mark.parametrize("distributed_tokens", [True, False])
def test_a_replicated_table_under_tensor_parallel_layers(distributed_tokens: bool) -> None:
    with ranks(4) as mesh:
        check_model(mesh, distributed_tokens)


@on_processes
def test_a_replicated_table_on_processes() -> None:
    check_model(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), distributed_tokens=True)


def test_a_data_parallel_table_that_is_small_is_reduced_once() -> None:
    with ranks(4) as mesh:
        weight = on(mesh, r(12, 4), grad=True)
        tokens = distribute_tensor(torch.randint(0, 12, (64, 16)), mesh, [Shard(0)])
        with CommDebugMode() as comm:
            embedded(weight, tokens).sum().backward()
        assert counts(comm) == {"all_reduce": 1}
        assert comm.get_total_bytes() == 2 * 12 * 4 * 4 * 3 // 4


def test_the_table_may_be_written_before_the_backward_pass() -> None:
    with ranks(2) as mesh:
        weight = on(mesh, r(10, 4), Shard(0), grad=True)
        result = embedded(weight, on(mesh, TOKENS % 10))
        with torch.no_grad():
            weight.mul_(2)
        result.sum().backward()
        expected = torch.bincount((TOKENS % 10).flatten(), minlength=10).float().unsqueeze(1).expand(10, 4)
        torch.testing.assert_close(whole(weight.grad), expected)  # type: ignore[arg-type]


def test_gradients_of_gradients() -> None:
    def twice(weight: Tensor, tokens: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(embedded(weight, tokens).pow(3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient.pow(2).sum(), weight)
        return second

    data, tokens = r(10, 4, dtype=torch.float64), TOKENS % 10
    expected = twice(data.clone().requires_grad_(), tokens)
    for placement in (Replicate(), Shard(0), Shard(1)):
        with ranks(3) as mesh:
            found = twice(on(mesh, data, placement, grad=True), on(mesh, tokens, Shard(0)))
            assert isinstance(found, DTensor)
            torch.testing.assert_close(whole(found), expected)


def test_a_plain_index_is_still_refused() -> None:
    with ranks(2) as mesh, pytest.raises(shardwise.errors.MixedTensorError, match="indices"):
        embedded(on(mesh, r(ROWS, 4), grad=True))
