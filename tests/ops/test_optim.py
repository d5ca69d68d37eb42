"""Lists of tensors: foreach and fused ops, and the check of scaled gradients. Optimizers are in tests/training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.errors import MixedTensorError
from shardwise.world import common
from tests.ops.helpers import check_case, communication, no_communication, on, r, ranks, table, whole

same, rows, columns = Replicate(), Shard(0), Shard(1)
SHAPES = [(8, 6), (5,), (3,), (6, 4), (1,)]
CUT: list[tuple[Placement, ...]] = [(rows, columns), (rows, rows), (rows, same), (columns, rows), (same, rows)]


def whole_of(value: Any) -> Any:
    return whole(value) if isinstance(value, DTensor) else value


@pytest.mark.parametrize("order", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf"), -float("inf")])
def test_norms_of_a_list_take_one_collective_for_each_set_of_axes(order: float) -> None:
    tensors = [r(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    with ranks(2, 2) as mesh:
        cut = [on(mesh, t, *how) for t, how in zip(tensors, CUT, strict=True)]
        found = torch._foreach_norm(cut, order)
        for one, many in zip(torch._foreach_norm(tensors, order), found, strict=True):
            torch.testing.assert_close(whole(many), one)


FOREACH: list[Any] = [
    ("add", lambda a, b: torch._foreach_add([a, b], [b, a], alpha=-2), (r(5, 4), r(5, 4, seed=1))),
    ("add a number", lambda a, b: torch._foreach_add([a, b], 2.0), (r(5, 4), r(3))),
    ("mul by numbers", lambda a, b: torch._foreach_mul([a, b], [2.0, -3.0]), (r(5, 4), r(3))),
    (
        "mul by a tensor",
        lambda a, b, c: torch._foreach_mul([a.detach(), b.detach()], c.detach()),
        (r(5, 4), r(3), r(seed=2)),
    ),
    ("addcmul", lambda a, b: torch._foreach_addcmul([a, b], [b, a], [a, a], 0.5), (r(5, 4), r(5, 4, seed=1))),
    ("addcdiv", lambda a, b: torch._foreach_addcdiv([a], [b], [a.abs() + 1], [0.5]), (r(5, 4), r(5, 4, seed=1))),
    ("lerp", lambda a, b: torch._foreach_lerp([a, b], [b, a], 0.3), (r(5, 4), r(5, 4, seed=1))),
    ("pow", lambda a, b: torch._foreach_pow([a.abs(), b.abs()], 2.0), (r(5, 4), r(3))),
    ("number to powers", lambda a, b: torch._foreach_pow(2.0, [a, b]), (r(5, 4), r(3))),
    ("maximum", lambda a, b: torch._foreach_maximum([a], [b]), (r(5, 4), r(5, 4, seed=1))),
    ("sqrt", lambda a, b: torch._foreach_sqrt([a.abs() + 1, b.abs() + 1]), (r(5, 4), r(3))),
    ("max", lambda a, b: torch._foreach_max([a.detach(), b.detach()]), (r(5, 4), r(3))),
]
WRITES: list[Any] = [
    ("add_", lambda a, b: torch._foreach_add_([a], [b]), (r(5, 4), r(5, 4, seed=1))),
    ("div_", lambda a, b: torch._foreach_div_([a, b], 2.0), (r(5, 4), r(3))),
    ("copy_", lambda a, b: torch._foreach_copy_([a], [b]), (r(5, 4), r(5, 4, seed=1))),
    ("zero_", lambda a, b: torch._foreach_zero_([a, b]), (r(5, 4), r(3))),
    ("lerp_", lambda a, b: torch._foreach_lerp_([a], [b], 0.3), (r(5, 4), r(5, 4, seed=1))),
    ("numbers in a tensor", lambda a, b: torch._foreach_addcdiv_([a], [b], [b], torch.ones(1)), (r(5, 4), r(5, 4))),
]


@table(FOREACH)
def test_ops_on_lists(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=5, meshes=((4,), (2, 2)), partial=("sum", "max"))


@table(WRITES)
def test_ops_on_lists_that_write(fn: Any, args: Any) -> None:
    check_case(lambda *tensors: (fn(*tensors), None)[1], args, limit=6, grad=False, meshes=((4,), (2, 2)))


def test_lists_cut_alike_need_no_communication() -> None:
    with ranks(4) as mesh:
        a = [on(mesh, r(5, 4, seed=i), Shard(i % 2)) for i in range(6)]
        b = [on(mesh, r(5, 4, seed=i), Shard(i % 2)) for i in range(6)]
        with no_communication():
            torch._foreach_add_(a, b, alpha=0.5)
            torch._foreach_lerp_(a, b, 0.1)
        assert not communication(lambda: torch._foreach_mul_(a, torch.tensor(2.0)))


def test_one_list_over_two_meshes() -> None:
    with ranks(2, 2) as mesh:
        first, second = mesh["a"], mesh["b"]
        tensors = [on(first, r(5, 4), Shard(0)), on(second, r(3), Shard(0)), r(2)]
        torch._foreach_mul_(tensors, 2.0)
        norms = torch._foreach_norm(tensors)
        for tensor, plain, norm in zip(tensors, (r(5, 4), r(3), r(2)), norms, strict=True):
            torch.testing.assert_close(whole_of(tensor), plain * 2)
            torch.testing.assert_close(whole_of(norm), (plain * 2).norm())


def gradients_of(mesh: DeviceMesh, bad: bool) -> list[DTensor]:
    values = [r(5, 4), r(3)]
    if bad:
        values[0][4, 3] = torch.inf  # on the last rank alone
    return [on(mesh, value, Shard(0)) for value in values]


@pytest.mark.parametrize("bad", [False, True])
def test_an_overflow_on_one_rank_is_known_to_all(bad: bool) -> None:
    with ranks(4) as mesh:
        gradients, found, scale = gradients_of(mesh, bad), torch.zeros(1), torch.tensor(0.5)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        assert found.item() == bad
        torch.testing.assert_close(whole(gradients[1]), r(3) * 0.5)


def test_a_scaler_skips_steps_that_overflow() -> None:
    with ranks(2) as mesh:
        leaf = nn.Parameter(on(mesh, r(4, 3), Shard(0)))
        optimizer, scaler = optim.SGD([leaf], lr=0.5), torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, torch.inf):
            optimizer.zero_grad()
            scaler.scale(on(mesh, torch.tensor(1.0), Replicate())).item()
            leaf.grad = on(mesh, torch.full((4, 3), 4.0 * factor), Shard(0))
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(whole(leaf.detach()), r(4, 3) - 0.5)
        assert scaler.get_scale() == 2.0


def test_partial_gradients_are_reduced_before_a_fused_step() -> None:
    values, gradient = r(4, 3), r(4, 3, seed=1)
    with ranks(2) as mesh:
        leaf = nn.Parameter(on(mesh, values.clone(), Shard(0)))
        leaf.grad = on(mesh, gradient, Partial())
        optim.SGD([leaf], lr=0.5, fused=True).step()
        torch.testing.assert_close(whole(leaf.detach()), values - 0.5 * gradient)
        assert leaf.placements == (Shard(0),)


def test_a_distributed_result_is_not_written_into_a_plain_tensor() -> None:
    with ranks(2) as mesh, pytest.raises(MixedTensorError, match="plain tensor"):
        torch._foreach_add_([torch.ones(2)], [on(mesh, torch.ones(2), Replicate())])


def test_changing_numbers_make_no_new_plans() -> None:
    with ranks(2) as mesh:
        tensors = [on(mesh, r(4, 3), Shard(0))]
        torch._foreach_add_(tensors, [0.5])
        before = len(DTensor._op_dispatcher.plans)
        for number in (0.25, 0.125):
            torch._foreach_add_(tensors, [number])
        assert len(DTensor._op_dispatcher.plans) == before
        assert common(tensors[0].full_tensor()).shape == (4, 3)
