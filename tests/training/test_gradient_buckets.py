"""Gradients that are reduced in buckets are those that are reduced one by one, in fewer collectives."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from shardwise import (
    DTensor,
    P,
    Partial,
    Replicate,
    Shard,
    accumulate_gradients,
    bucket_gradients,
    distribute_module,
    distribute_tensor,
    erase,
)
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError
from shardwise.tensor import gradient_buckets
from tests.ops.helpers import on, ranks
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.training.models import PLACINGS, batch, cut_batch, data_parallel, loss_of, network, placed
from tests.training.parameters import whole_of


@contextmanager
def counted(expected: int) -> Iterator[None]:
    with CommDebugMode() as counts:
        yield
    assert counts.get_total_counts() == expected, dict(counts.get_comm_counts())


def grads_of(module: nn.Module) -> list[Tensor]:
    return [whole_of(p.grad) for p in module.parameters()]


def assert_like_one_device(many: nn.Module, one: nn.Module) -> None:
    for p, q in zip(many.parameters(), one.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None
            continue
        assert isinstance(p.grad, DTensor)
        assert p.grad.placements == p.placements
        assert p.grad._source is None
        torch.testing.assert_close(whole_of(p.grad), q.grad)


class Chain(nn.Module):
    """Layers of one size, the last of which is not used."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = x + layer(x).tanh()
        return x


LAYER = 8 * 8 * 4


# ---- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_bucket", [1, 2, 3, 10])
def test_as_many_collectives_as_buckets(per_bucket: int) -> None:
    with ranks(4) as mesh:
        many = distribute_module(Chain(8), mesh)
        loss = many(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])).square().mean()
        with bucket_gradients(per_bucket * LAYER), CommDebugMode() as comm:
            loss.backward()
        assert comm.get_total_counts() == math.ceil(7 / per_bucket)
        assert comm.get_total_bytes() == 7 * LAYER * 2 * 3 // 4


def test_a_shard_over_an_axis_is_scattered_in_buckets() -> None:
    with ranks(4) as mesh:
        many, one = placed(Chain(6), mesh, lambda name: [Shard(0)]), Chain(6)
        x = torch.randn(8, 8)
        loss = many(distribute_tensor(x, mesh, [Shard(0)])).square().mean()
        with CommDebugMode() as comm:
            loss.backward()
        counts = {str(op): count for op, count in comm.get_comm_counts().items()}
        assert counts["c10d_functional.reduce_scatter_tensor"] == 1
        one(x).square().mean().backward()
        assert_like_one_device(many, one)


def test_a_large_gradient_is_sent_alone() -> None:
    """It does not fill a bucket, and is not copied into one."""
    with ranks(2) as mesh:
        many = distribute_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 200), nn.Linear(200, 2)), mesh)
        loss = many(distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])).square().mean()
        with bucket_gradients("3 KiB"), CommDebugMode() as comm:
            loss.backward()
        assert sorted(c.received for c in comm.collectives) == [(8 * 8 + 8 + 200 + 400 + 2) * 4, 1600 * 4]


def test_full_buckets_are_sent_while_the_pass_goes_on() -> None:
    with ranks(2) as mesh:
        many = distribute_module(Chain(8), mesh)
        x, sent = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_(), []
        y = x * 1
        y.register_hook(lambda grad: sent.append(comm.get_total_counts()))
        loss = many(y).square().mean()
        with bucket_gradients(2 * LAYER), CommDebugMode() as comm:
            loss.backward()
        assert (sent, comm.get_total_counts()) == ([3], 4)


def test_one_by_one_on_request() -> None:
    with ranks(2) as mesh:
        many = distribute_module(Chain(4), mesh)
        losses = [many(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])).sum() for _ in range(3)]
        with bucket_gradients(None), counted(3):
            losses[0].backward()
        before = bucket_gradients(0)
        with counted(3):
            losses[1].backward()
        before.__exit__()
        with counted(1):
            losses[2].backward()


def test_gradients_are_views_of_one_buffer() -> None:
    with ranks(2) as mesh:
        many = distribute_module(Chain(4), mesh)
        many(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])).square().mean().backward()
        grads = [p.grad.shards[0] for p in many.parameters() if p.grad is not None]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
        assert all(grad.is_contiguous() for grad in grads)
        grads[0].zero_()
        assert all(grad.any() for grad in grads[1:])


@pytest.mark.parametrize("size", ["25", "MiB", "1.2.3 MiB", "1 mib", "-1 B", -1])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises((InputError, ValueError)):
        bucket_gradients(size)
    assert gradient_buckets.bucket_size() == 25 << 20


def test_sizes_as_text() -> None:
    for text, size in {"25 MiB": 25 << 20, "2GB": 2 * 10**9, "0.5 KiB": 512, "7 B": 7}.items():
        with bucket_gradients(text):
            assert gradient_buckets.bucket_size() == size


# ---- equal values ----------------------------------------------------------------------------------------------------


def passes(module: nn.Module, make: Callable[[int], Tensor], drop: bool) -> list[Tensor]:
    for seed in (1, 2, 3):
        loss_of(module, make(seed)).backward()
        if drop and seed == 1:
            module.zero_grad(set_to_none=False)
    return grads_of(module)


@pytest.mark.parametrize("name", PLACINGS)
@pytest.mark.parametrize("size", [100, "25 MiB"])
def test_bitwise_as_one_by_one(name: str, size: Any) -> None:
    with ranks(2, 2) as mesh:
        found = []
        for each in (None, size):
            with bucket_gradients(each):
                many = placed(network(), mesh, PLACINGS[name])
                found.append(passes(many, lambda seed: cut_batch(seed, mesh), drop=True))
        one = network()
        passes(one, batch, drop=True)
        assert all(map(torch.equal, *found))
        assert_like_one_device(many, one)


def test_random_sizes() -> None:
    """Parameters of random shapes, replicated or sharded over the second axis, in random buckets."""
    kinds = [[Replicate(), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(1)]]
    shapes = st.tuples(st.sampled_from([1, 4, 7]), st.sampled_from([3, 6]), st.sampled_from(kinds))

    @settings(max_examples=25, deadline=None)
    @given(st.lists(shapes, min_size=1, max_size=6), st.integers(1, 900))
    def check(shapes: list[tuple[int, int, list[Any]]], size: int) -> None:
        values = [torch.randn(rows, columns, dtype=torch.float64) for rows, columns, _ in shapes]
        found = []
        for each in (0, size):
            leaves = [on(mesh, value, *kind, grad=True) for value, (_, _, kind) in zip(values, shapes, strict=True)]
            loss = sum((cut[:, : leaf.shape[0]] @ leaf).square().sum() for leaf in leaves)
            with bucket_gradients(each), CommDebugMode() as comm:
                loss.backward()
            found.append([whole_of(leaf.grad) for leaf in leaves])
            assert all(leaf.grad.placements == leaf.placements for leaf in leaves)
        assert all(map(torch.equal, *found))
        if kinds[1] not in [kind for _, _, kind in shapes]:  # a matrix sharded over rows may be moved after its sum
            held = sum(max(shard.nbytes for shard in leaf.grad.shards.values()) for leaf in leaves)
            assert len([c for c in comm.collectives if c.over == "a"]) <= math.ceil(held / size)
        for leaf, value in zip(leaves, values, strict=True):
            value.requires_grad_()
            (x[:, : value.shape[0]] @ value).square().sum().backward()
            torch.testing.assert_close(whole_of(leaf.grad), value.grad)

    with ranks(2, 2) as mesh:
        x = torch.randn(5, 9, dtype=torch.float64)
        cut = distribute_tensor(x, mesh, [Shard(0), Replicate()])
        check()


def test_dtypes_do_not_mix() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float32]
    with ranks(2) as mesh:
        leaves = [on(mesh, torch.ones(3, dtype=dtype), grad=True) for dtype in dtypes]
        x = distribute_tensor(torch.arange(1.0, 4.0), mesh, [Shard(0)])
        loss = sum((leaf.abs()[None, :] * x[:, None].to(leaf.abs().dtype)).sum() for leaf in leaves)
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_total_counts() == 4
        for leaf in leaves:
            assert leaf.grad.dtype == leaf.dtype
            assert whole_of(leaf.grad).tolist() == [6, 6, 6]


@pytest.mark.parametrize(("op", "expected"), [("sum", 12.0), ("avg", 3.0), ("max", 4.0), ("min", 2.0)])
def test_other_reductions(op: str, expected: float) -> None:
    with ranks(4) as mesh:
        leaves = [on(mesh, torch.ones(3), grad=True) for _ in range(2)]
        weight = distribute_tensor(torch.tensor([2.0, 4.0, 2.0, 4.0]), mesh, [Shard(0)]).to_local()
        loss = sum((leaf.to_local(grad_placements=[Partial(op)]) * weight).sum() for leaf in leaves)
        with counted(1):
            loss.backward()
        assert [whole_of(leaf.grad).tolist() for leaf in leaves] == [[expected] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_over_one_axis_and_averages_over_another(dtype: torch.dtype) -> None:
    with ranks(2, 2) as mesh:
        leaves = [on(mesh, torch.ones(3, dtype=dtype), grad=True) for _ in range(3)]
        weight = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype), mesh, [Shard(0)] * 2).to_local()
        mixed = [Partial("avg"), Partial("sum")]
        loss = sum((leaf.to_local(grad_placements=mixed) * weight).sum() for leaf in leaves)
        with counted(1):
            loss.backward()
        assert [whole_of(leaf.grad).tolist() for leaf in leaves] == [[5.0] * 3] * 3


def test_tied_parameters_and_other_memory_orders() -> None:
    with ranks(2) as mesh:
        found = []
        for size in (None, "25 MiB"):
            torch.manual_seed(0)
            first, second = nn.Linear(6, 6), nn.Linear(6, 6)
            second.weight = first.weight
            conv = nn.Conv2d(3, 3, 2).to(memory_format=torch.channels_last)
            model = distribute_module(nn.Sequential(first, nn.GELU(), second, nn.Unflatten(1, (3, 1, 2)), conv), mesh)
            x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
            with bucket_gradients(size):
                model[:3](x).square().sum().backward()
                conv(distribute_tensor(torch.randn(4, 3, 4, 4), mesh, [Shard(0)])).square().sum().backward()
            assert conv.weight.grad.stride() == conv.weight.stride()
            found.append(grads_of(model))
        assert all(map(torch.equal, *found))


# ---- who reads while the pass runs -----------------------------------------------------------------------------------


def test_what_is_added_to_stays_the_same_tensor() -> None:
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, data_parallel)
        loss_of(many, cut_batch(1, mesh)).backward()
        held = [p.grad for p in many.parameters()]
        loss = loss_of(many, cut_batch(2, mesh))
        with counted(1):
            loss.backward()
        assert all(p.grad is grad for p, grad in zip(many.parameters(), held, strict=True))
        one = network()
        for seed in (1, 2):
            loss_of(one, batch(seed)).backward()
        assert_like_one_device(many, one)


def test_hooks_read_the_gradients_of_other_leaves() -> None:
    def run(module: nn.Sequential, make: Callable[[int], Tensor]) -> list[Tensor]:
        seen: list[Tensor] = []
        for seed in (1, 2):
            hidden = module[:3](make(seed))
            hidden.register_hook(lambda grad: seen.append(module[3].weight.grad.clone()))
            module[3:](hidden).square().mean().backward()
        return [*seen, *(p.grad for p in module.parameters())]

    with ranks(2, 2) as mesh:
        found = run(placed(network(), mesh, data_parallel), lambda seed: cut_batch(seed, mesh))
        for value, wanted in zip(found, run(network(), batch), strict=True):
            torch.testing.assert_close(whole_of(value), wanted)


def test_hooks_after_accumulation() -> None:
    """They run in the pass, and see the reduced gradient; what they do to it stays."""

    def run(module: nn.Module, make: Callable[[int], Tensor]) -> list[Tensor]:
        seen: list[Tensor] = []
        module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        module[3].weight.register_post_accumulate_grad_hook(lambda p: double(p.grad))
        module[4].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        for seed in (1, 2):
            loss_of(module, make(seed)).backward()
        assert module[4].weight.grad is None
        return [*seen, *(p.grad for p in module.parameters() if p.grad is not None)]

    with ranks(2, 2) as mesh:
        found = run(placed(network(), mesh, data_parallel), lambda seed: cut_batch(seed, mesh))
        for value, wanted in zip(found, run(network(), batch), strict=True):
            torch.testing.assert_close(whole_of(value), wanted)


def test_a_gradient_in_a_bucket_is_an_ordinary_tensor_whose_data_comes_later() -> None:
    """Its class never changes; autograd accumulates it without its data, and another op sends the bucket."""
    with ranks(2) as mesh:
        many, one = distribute_module(Chain(4), mesh), Chain(4)
        x = torch.randn(8, 8)
        seen: list[tuple[type, bool, int]] = []

        def look(parameter: Tensor) -> None:
            grad = parameter.grad
            seen.append((type(grad), grad._source is None, comm.get_total_counts()))

        def read(parameter: Tensor) -> None:
            look(parameter)
            other = parameter.grad.detach()  # an op of the program, not the one by which autograd accumulates
            look(parameter)
            other.mul_(2)

        many.layers[2].weight.register_post_accumulate_grad_hook(look)
        many.layers[1].weight.register_post_accumulate_grad_hook(read)
        loss = many(distribute_tensor(x, mesh, [Shard(0)])).square().mean()
        with CommDebugMode() as comm:
            loss.backward()
        assert seen == [(DTensor, False, 0), (DTensor, False, 0), (DTensor, True, 1)]
        assert comm.get_total_counts() == 2  # the bucket that was read, and that of the last gradient
        one(x).square().mean().backward()
        one.layers[1].weight.grad.mul_(2)
        assert_like_one_device(many, one)


def test_a_hook_that_adds_the_gradient_of_another_leaf_adds_what_it_is_now() -> None:
    def run(module: nn.Module, make: Callable[[int], Tensor]) -> list[Tensor]:
        first, last = module[0].weight, module[3].weight
        zeros = torch.zeros_like(first)

        def add(parameter: Tensor) -> None:
            parameter.grad.add_(zeros + last.grad.sum())
            parameter.grad.add_(parameter.grad)
            last.grad.zero_()

        first.register_post_accumulate_grad_hook(add)
        for seed in (1, 2):
            loss_of(module, make(seed)).backward()
        return [p.grad for p in module.parameters()]

    with ranks(2, 2) as mesh:
        found = run(placed(network(), mesh, data_parallel), lambda seed: cut_batch(seed, mesh))
        for value, wanted in zip(found, run(network(), batch), strict=True):
            torch.testing.assert_close(whole_of(value), wanted)


def test_gradients_that_are_asked_for() -> None:
    with ranks(2, 2) as mesh:
        many, one = placed(network(), mesh, data_parallel), network()
        loss = loss_of(many, cut_batch(1, mesh))
        with counted(1):
            grads = torch.autograd.grad(loss, list(many.parameters()))
        assert {type(grad) for grad in grads} == {DTensor}
        expected = torch.autograd.grad(loss_of(one, batch(1)), list(one.parameters()))
        for found, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(whole_of(found), wanted)


def test_backward_inside_backward() -> None:
    def run(module: nn.Sequential, make: Callable[[int], Tensor]) -> None:
        hidden = module[:3](make(1))

        def again(grad: Tensor) -> None:
            with torch.enable_grad():
                loss_of(module, make(2)).backward()

        hidden.register_hook(again)
        module[3:](hidden).square().mean().backward()
        checkpoint(module, make(3).requires_grad_(), use_reentrant=True).square().mean().backward()

    with ranks(2, 2) as mesh:
        many, one = placed(network(), mesh, data_parallel), network()
        run(many, lambda seed: cut_batch(seed, mesh))
        run(one, batch)
        assert_like_one_device(many, one)


def double(grad: Tensor) -> None:
    grad.mul_(2)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("half way")


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", ["zeroed", "added to", "read"])
@pytest.mark.parametrize("size", [200, "25 MiB"])
def test_a_pass_that_fails_half_way(before: bool, after: str, size: Any) -> None:
    def run(module: nn.Sequential, make: Callable[[int], Tensor]) -> None:
        if before:
            loss_of(module, make(1)).backward()
        with pytest.raises(ArithmeticError):
            module[3:](Fail.apply(module[:3](make(2)))).square().mean().backward()
        if after == "zeroed":
            module.zero_grad()
        if after != "read":
            loss_of(module, make(3)).backward()
        for p in module.parameters():
            if isinstance(p.grad, DTensor):
                assert p.grad._local_tensor is not None

    with ranks(2, 2) as mesh, bucket_gradients(size):
        many, one = placed(network(), mesh, data_parallel), network()
        run(many, lambda seed: cut_batch(seed, mesh))
        run(one, batch)
        assert_like_one_device(many, one)
    gc.collect()
    assert not gradient_buckets._passes


def test_a_pass_that_fails_before_it_accumulates() -> None:
    """The gradient of earlier passes is what it was."""
    with ranks(2) as mesh:
        w = nn.Parameter(on(mesh, torch.ones(4, 4)))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        (x @ w).sum().backward()
        held, node = w.grad, torch.autograd.graph.get_gradient_edge(w).node

        def fail(grads: Any) -> None:
            raise ArithmeticError

        handle = node.register_prehook(fail)
        with pytest.raises(ArithmeticError):
            (x @ w).sum().backward()
        handle.remove()
        assert w.grad is held
        (x @ w).sum().backward()
        assert whole_of(w.grad).tolist() == [[8.0] * 4] * 4


def test_threads() -> None:
    with ranks(2, 2) as mesh:
        many, one = placed(network(), mesh, data_parallel), network()
        losses = [loss_of(many, cut_batch(seed, mesh)) for seed in range(6)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed in range(6):
            loss_of(one, batch(seed)).backward()
        assert_like_one_device(many, one)


def test_accumulated_gradients_share_buckets() -> None:
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, data_parallel)
        first, last = (loss_of(many, cut_batch(seed, mesh)) for seed in (1, 2))
        with accumulate_gradients(), counted(0):
            first.backward()
        with counted(1):
            last.backward()


def test_an_erased_step() -> None:
    with ranks(2, 2) as mesh:
        found = []
        for wrap in (erase, lambda step: step):
            many = placed(network(), mesh, data_parallel)
            optimizer = optim.AdamW(many.parameters(), lr=0.1)

            def step(x: Tensor, many: nn.Module = many, optimizer: optim.Optimizer = optimizer) -> Tensor:
                loss = loss_of(many, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            run = wrap(step)
            for seed in range(4):
                run(cut_batch(seed, mesh))
            with CommDebugMode() as comm:
                run(cut_batch(5, mesh))
            found.append(([whole_of(p) for p in many.parameters()], comm.get_total_counts()))
        assert found[0][1] <= found[1][1]
        for a, b in zip(found[0][0], found[1][0], strict=True):
            torch.testing.assert_close(a, b)


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 300, "25 MiB"])
@on_processes
def test_training_on_processes(size) -> None:
    mesh = mesh_of(2, 2)
    with bucket_gradients(size):
        for placing in PLACINGS.values():
            one, many = network(), placed(network(), mesh, placing)
            optimizers = [optim.AdamW(module.parameters(), lr=0.01) for module in (one, many)]
            for seed in range(4):
                for module, make in ((one, batch), (many, lambda seed: cut_batch(seed, mesh))):
                    loss_of(module, make(seed)).backward()
                for module, optimizer in zip((one, many), optimizers, strict=True):
                    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=seed % 2 == 0)
            for p, q in zip(many.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(p.full_tensor(), q.detach())


@on_processes
def test_readers_on_processes() -> None:
    mesh = mesh_of(4)
    leaves = [on(mesh, torch.ones(5), grad=True) for _ in range(4)]
    leaves[1].register_post_accumulate_grad_hook(lambda leaf: double(leaf.grad))
    x = distribute_tensor(torch.arange(1.0, 6.0), mesh, P("a"))
    loss = sum((leaf[None, :] * x[:, None]).sum() for leaf in leaves)
    loss.backward(retain_graph=True)
    if torch.distributed.get_rank() == 1:  # after the pass, a rank may read alone
        assert leaves[0].grad.to_local().tolist() == [15.0] * 5
    with pytest.raises(ArithmeticError):
        (Fail.apply(leaves[0] * 1) * x[:, None]).sum().backward()
    loss.backward()
    assert [leaf.grad.to_local()[0].item() for leaf in leaves] == [30.0, 90.0, 30.0, 30.0]
