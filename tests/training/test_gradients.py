"""A leaf's gradient has the leaf's placements and is reduced once: per step, or for several micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, accumulate_gradients
from shardwise.debug import CommDebugMode
from tests.ops.helpers import on, ranks
from tests.training.models import PLACINGS, batch, cut_batch, data_parallel, loss_of, network, placed
from tests.training.parameters import whole_of

BATCHES = (1, 2, 3)


@contextmanager
def counted(expected: int) -> Iterator[None]:
    with CommDebugMode() as counts:
        yield
    assert counts.get_total_counts() == expected, dict(counts.get_comm_counts())


def summed_gradients() -> dict[str, torch.Tensor]:
    one = network()
    for seed in BATCHES:
        loss_of(one, batch(seed)).backward()
    return {name: p.grad for name, p in one.named_parameters() if p.grad is not None}


def assert_gradients(many: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    for name, p in many.named_parameters():
        assert isinstance(p.grad, DTensor)
        assert p.grad.placements == p.placements
        torch.testing.assert_close(whole_of(p.grad), wanted[name])


def test_a_step_reduces_gradients_once_and_the_optimizer_none() -> None:
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, data_parallel)
        optimizer = optim.AdamW(many.parameters(), foreach=True)
        loss = loss_of(many, cut_batch(1, mesh))
        with counted(1):  # the gradients of all parameters; that of the loss is replicated already
            loss.backward()
        with counted(0):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", PLACINGS)
def test_gradients_of_several_passes(name: str) -> None:
    with ranks(2, 2) as mesh:
        wanted = summed_gradients()
        for deferred in (False, True):
            many = placed(network(), mesh, PLACINGS[name])
            for seed in BATCHES:
                with accumulate_gradients(deferred and seed != BATCHES[-1]):
                    loss_of(many, cut_batch(seed, mesh)).backward()
            assert_gradients(many, wanted)


def test_deferred_reductions_are_done_once() -> None:
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, data_parallel)
        *first, last, after = [loss_of(many, cut_batch(seed, mesh)) for seed in (*BATCHES, 1)]
        with accumulate_gradients(), counted(0):
            for loss in first:
                loss.backward()
        assert all(p.grad.placements == (Partial(), Replicate()) for p in many.parameters())
        with counted(1):
            last.backward()
        assert_gradients(many, summed_gradients())
        with counted(1):  # and then as before
            after.backward()


def test_along_axes_that_cut_a_parameter_nothing_waits() -> None:
    with ranks(2, 2) as mesh:
        w = nn.Parameter(on(mesh, torch.ones(4, 4), Replicate(), Shard(0)))
        x = on(mesh, torch.ones(4, 4), Shard(0), Shard(0))
        with accumulate_gradients():
            (x @ w).square().sum().backward()
        assert w.grad is not None
        assert w.grad.placements == (Partial(), Shard(0))


def test_hooks_see_reduced_gradients_after_accumulation() -> None:
    with ranks(2, 2) as mesh:
        many, seen = placed(network(), mesh, data_parallel), []
        for p in many.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
            p.register_hook(lambda grad: grad * 2)
        with accumulate_gradients():
            loss_of(many, cut_batch(1, mesh)).backward()
        assert set(seen) == {(Partial(), Replicate())}
        seen.clear()
        loss_of(many, cut_batch(2, mesh)).backward()
        assert set(seen) == {(Replicate(), Replicate())}
        loss_of(many, cut_batch(3, mesh)).backward()
        assert_gradients(many, {name: 2 * g for name, g in summed_gradients().items()})


def test_gradients_that_are_asked_for_are_reduced_at_once() -> None:
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, data_parallel)
        with accumulate_gradients():
            loss_of(many, cut_batch(1, mesh)).backward()
            asked = torch.autograd.grad(loss_of(many, cut_batch(2, mesh)), list(many.parameters()))
        assert all(grad.placements == (Replicate(), Replicate()) for grad in asked)
        again = torch.autograd.grad(loss_of(many, cut_batch(2, mesh)), list(many.parameters()))
        assert all(grad.placements == (Replicate(), Replicate()) for grad in again)
        loss_of(many, cut_batch(2, mesh)).backward(inputs=[many[0].weight])
        assert [p.grad.placements[0] for p in many.parameters()] == [Replicate(), *[Partial()] * 5]


def test_zeroed_between() -> None:
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, data_parallel)
        with accumulate_gradients():
            loss_of(many, cut_batch(9, mesh)).backward()
        many.zero_grad()
        for seed in BATCHES:
            loss_of(many, cut_batch(seed, mesh)).backward()
        assert_gradients(many, summed_gradients())


def test_a_parameter_that_the_last_pass_does_not_reach() -> None:
    """Its gradient is still a sum in the making; what reads it gets the right value."""
    with ranks(2, 2) as mesh:
        many, one = placed(network(), mesh, data_parallel), network()
        with accumulate_gradients():
            loss_of(many, cut_batch(1, mesh)).backward()
        loss_of(one, batch(1)).backward()
        for way in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            for module in (one, many):
                optim.SGD(module.parameters(), lr=0.1, **way).step()
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.1).item() for module in (one, many)]
        assert norms[0] == pytest.approx(norms[1])
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(whole_of(p), q.detach())
            torch.testing.assert_close(whole_of(p.grad), q.grad)


# ---- autograd's other doors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACINGS)
def test_autograd_grad_and_twice(name: str) -> None:
    def penalty(module: nn.Module, inputs: Any) -> list[torch.Tensor]:
        params = list(module.parameters())
        grads = torch.autograd.grad(loss_of(module, inputs), params, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        return [*grads, *(p.grad for p in params)]

    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, PLACINGS[name])
        found = penalty(many, cut_batch(1, mesh))
        wanted = penalty(network(), batch(1))
        placements = [p.placements for p in many.parameters()] * 2
        for a, b, how in zip(found, wanted, placements, strict=True):
            assert isinstance(a, DTensor)
            assert a.placements == how
            torch.testing.assert_close(whole_of(a), b.detach())


@pytest.mark.parametrize("name", PLACINGS)
def test_hooks_of_tensors_and_modules(name: str) -> None:
    def seen_by(module: nn.Sequential, inputs: Any) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}

        def note(name: str, *tensors: torch.Tensor) -> None:
            seen.update({f"{name} {index}": tensor for index, tensor in enumerate(tensors)})

        module[3].register_forward_pre_hook(lambda m, args: note("argument", *args))
        module[0].register_forward_hook(lambda m, args, out: note("output", out))
        module[3].register_full_backward_hook(lambda m, gi, go: note("backward", *gi, *go))
        module[3].register_full_backward_pre_hook(lambda m, go: note("before backward", *go))
        module[0].weight.register_hook(lambda g: note("gradient", g) or g * 3)
        module[0].bias.register_post_accumulate_grad_hook(lambda p: note("accumulated", p.grad))
        hidden = module[:3](inputs)
        hidden.retain_grad()
        module[3:](hidden).square().mean().backward()
        note("kept", hidden.grad, module[0].weight.grad)
        return seen

    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, PLACINGS[name])
        found, wanted = seen_by(many, cut_batch(1, mesh)), seen_by(network(), batch(1))
        assert found.keys() == wanted.keys()
        for what, value in wanted.items():
            assert isinstance(found[what], DTensor), what
            torch.testing.assert_close(whole_of(found[what]), value.detach())


def test_the_optimizer_in_the_backward_pass() -> None:
    def step(module: nn.Module, inputs: Any) -> None:
        for p in module.parameters():
            optimizer = optim.Adam([p], lr=0.1, foreach=True)

            def update(p: Any, optimizer: optim.Optimizer = optimizer) -> None:
                assert not isinstance(p, DTensor) or p.grad.placements == p.placements
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(update)
        loss_of(module, inputs).backward()

    with ranks(2, 2) as mesh:
        one, many = network(), placed(network(), mesh, PLACINGS["tensor parallel"])
        step(one, batch(1))
        step(many, cut_batch(1, mesh))
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(whole_of(p), q.detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, PLACINGS["tensor parallel"])
        with mode():
            out = many(cut_batch(1, mesh))
            assert not out.requires_grad
            assert out.is_inference() == (mode is torch.inference_mode)
            torch.testing.assert_close(shardwise.world.common(out.full_tensor()), network()(batch(1)).detach())


def test_frozen_and_thawed() -> None:
    with ranks(2, 2) as mesh:
        w = nn.Parameter(on(mesh, torch.ones(6, 6, dtype=torch.float64)))
        for frozen in (True, False):
            w.requires_grad_(not frozen)
        w.data = on(mesh, torch.ones(6, 6, dtype=torch.float64), Shard(0))
        loss = (cut_batch(1, mesh) @ w).square().mean()
        with CommDebugMode() as counts:
            loss.backward()
        assert [str(op) for op in counts.get_comm_counts()] == ["c10d_functional.reduce_scatter_tensor"]
        assert w.grad is not None
        assert w.grad.placements == (Shard(0), Replicate())
