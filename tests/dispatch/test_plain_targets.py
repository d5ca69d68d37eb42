"""Distributed values that are written into plain tensors are gathered first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import Partial, Placement, Replicate, Shard
from shardwise.errors import CommunicationError, InputError, MixedTensorError
from shardwise.testing import assemble
from tests.ops.helpers import on, r, ranks

X, Y = r(5, 4), r(5, 4, seed=1)
ROWS = torch.tensor([3, 0, 4, 1, 2])


def _set_slice(target: Tensor, x: Tensor) -> object:
    target[1:4] = x[1:4]
    return target


def _set_mask(target: Tensor, x: Tensor) -> object:
    target[x > 0] = 7.0
    return target


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda target, x: target.copy_(x),
    "add_": lambda target, x: target.add_(x, alpha=2),
    "index_copy_": lambda target, x: target.index_copy_(0, ROWS, x),
    "index_add_": lambda target, x: target.index_add_(0, ROWS, x),
    "scatter_": lambda target, x: target.scatter_(0, ROWS[:, None].expand(5, 4), x),
    "slice": _set_slice,
    "mask": _set_mask,
    "out=": lambda target, x: torch.add(x, x, out=target),
    "sort out=": lambda target, x: torch.sort(x, dim=0, out=(target, torch.empty(5, 4, dtype=torch.int64)))[0],
    "foreach": lambda target, x: torch._foreach_mul_([target, target], [x, x]),
}


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1), Shard(0)], [Partial()], [Replicate()]], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_gathers(name: str, placements: list[Placement]) -> None:
    write, wanted = WRITES[name], Y.clone()
    write(wanted, X)
    with ranks(*[2] * len(placements)) as mesh, shardwise.implicit_replication():
        target = Y.clone()
        result = write(target, on(mesh, X, *placements))
        assert type(target) is Tensor
        assert result is target or name == "foreach"
        torch.testing.assert_close(target, wanted)


@pytest.mark.parametrize("name", ["copy_", "add_", "index_copy_", "index_add_", "slice"])
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_gradients_flow_to_the_distributed_source(name: str, leaf: bool, inside: bool) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        target = y * 1
        WRITES[name](target, x if leaf else x * x)
        return (target * target).sum()

    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    loss(x, y).backward()
    with ranks(2, 2) as mesh:
        z, w = on(mesh, X, Shard(0), Shard(1), grad=True), Y.clone().requires_grad_()
        with shardwise.implicit_replication():
            found = loss(z, w)
            if inside:
                found.backward()
        if not inside:
            found.backward()
        assert z.grad is not None
        assert z.grad.placements == z.placements
        torch.testing.assert_close(assemble(z.grad), x.grad)
        torch.testing.assert_close(w.grad, y.grad)


def test_gradients_where_the_written_tensor_meets_distributed_ones() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(5, 4)
        for rows in ROWS.split(2):
            total.index_add_(0, rows, (x * x)[: len(rows)])
        return (total @ w).square().sum()

    weight = r(4, 3, seed=2)
    x, w = X.clone().requires_grad_(), weight.clone().requires_grad_()
    loss(x, w).backward()
    with ranks(2) as mesh:
        z, v = on(mesh, X, Shard(0), grad=True), on(mesh, weight, Shard(1), grad=True)
        with shardwise.implicit_replication():
            loss(z, v).backward()
        torch.testing.assert_close(assemble(z.grad), x.grad)
        torch.testing.assert_close(assemble(v.grad), w.grad)


def test_statistics_in_plain_buffers() -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    wanted = torch.nn.functional.batch_norm(X, mean, var, training=True)
    with ranks(2) as mesh, shardwise.implicit_replication():
        its_mean, its_var = torch.zeros(4), torch.ones(4)
        found = torch.nn.functional.batch_norm(on(mesh, X, Shard(0)), its_mean, its_var, training=True)
        torch.testing.assert_close(assemble(found), wanted)
        torch.testing.assert_close((its_mean, its_var), (mean, var))


def test_a_number_is_written_anywhere() -> None:
    with ranks(2) as mesh:
        total = torch.zeros(())
        for _ in range(2):
            total += on(mesh, X, Shard(0)).sum()
        torch.testing.assert_close(total, 2 * X.sum())


def test_a_plain_value_for_the_data_of_a_distributed_tensor() -> None:
    with ranks(2, 2) as mesh:
        x = on(mesh, X, Shard(1), Shard(0), grad=True)
        with pytest.raises(InputError, match="implicit_replication"):
            x.data = torch.ones(7, 4)
        with shardwise.implicit_replication():
            x.data = r(7, 4)
        assert x.placements == (Shard(1), Shard(0))
        (x * x).sum().backward()
        torch.testing.assert_close(assemble(x), r(7, 4))
        torch.testing.assert_close(assemble(x.grad), 2 * r(7, 4))


def test_a_distributed_number_scales_plain_lists() -> None:
    with ranks(2) as mesh, shardwise.implicit_replication():
        x, plain = on(mesh, X, Shard(0)), Y.clone()
        torch._foreach_mul_([plain, x], x.sum())
        torch.testing.assert_close(plain, Y * X.sum())
        torch.testing.assert_close(assemble(x), X * X.sum())


def test_refused_outside_of_the_block_and_in_explicit_mode() -> None:
    with ranks(2) as mesh:
        plain, x = Y.clone(), on(mesh, X, Shard(0))
        with pytest.raises(MixedTensorError, match="implicit_replication"):
            plain.add_(x)
        with shardwise.implicit_replication(), shardwise.explicit():
            with pytest.raises(CommunicationError, match="gather"):
                plain.add_(x)
            plain.add_(x.redistribute(placements=[Replicate()]) * 0)
        assert torch.equal(plain, Y)
