"""One gather serves all ops in a row that read the same tensor; and none that reads another, or what was written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardwise import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import CommDebugMode
from shardwise.dispatch.gather_cache import GatherCache, GatheredOperand
from shardwise.dispatch.watch import Watch, mark_exposed
from shardwise.world import RankTensor

ROWS, COLUMNS = 8, 256


def weights(mesh: Any, count: int) -> tuple[list[Tensor], list[DTensor]]:
    torch.manual_seed(0)
    plain = [torch.randn(COLUMNS, COLUMNS, requires_grad=True) for _ in range(count)]
    return plain, [distribute_tensor(w.detach(), mesh, [Shard(0)]).requires_grad_() for w in plain]


def collectives(run: Callable[[], Any]) -> dict[str, int]:
    with CommDebugMode() as counter:
        run()
    return {packet.__name__.split(".")[-1]: n for packet, n in counter.get_comm_counts().items()}


@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (1, ROWS, COLUMNS)])
def test_one_gather_forward_and_one_reduction_backward(shape: tuple[int, ...]) -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        plain, cut = weights(mesh, 3)
        data = torch.randn(shape, requires_grad=True)
        torch.stack([F.linear(data * 2, w) for w in plain]).square().mean().backward()
        x = distribute_tensor(data.detach(), mesh, [Shard(len(shape) - 2)]).requires_grad_()
        made: list[DTensor] = []

        def forward() -> None:
            hidden = x * 2
            made.extend(F.linear(hidden, w) for w in cut)

        assert collectives(forward) == {"all_gather_into_tensor": 1}
        loss = torch.stack(made).square().mean().redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
        # The input is gathered again for the gradients of the weights, rather than kept.
        assert collectives(loss.backward) == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        assert x.grad is not None
        torch.testing.assert_close(x.grad.full_tensor().shards[0], data.grad, rtol=1e-4, atol=1e-5)
        for whole, part in zip(plain, cut, strict=True):
            torch.testing.assert_close(part.grad.full_tensor().shards[0], whole.grad, rtol=1e-4, atol=1e-5)


def add_in_place(x: DTensor) -> None:
    x.add_(1)


def add_in_part(x: DTensor) -> None:
    x.to_local().add_(1)


def add_in_a_rank(x: DTensor) -> None:
    for part in x.shards.values():
        part.add_(1)


def add_in_part_of_view(x: DTensor) -> None:
    x.view(-1, COLUMNS).to_local().add_(1)


def add_through_data(x: DTensor) -> None:
    x.data.add_(1)


def add_by_address(local: Any) -> None:
    """As a kernel that was given an address: no version counter sees it."""
    for shard in local.shards:
        numbers = (ctypes.c_float * shard.numel()).from_address(shard.data_ptr())
        numbers[:] = [number + 1 for number in numbers]


def add_by_address_of_shards(x: DTensor) -> None:
    add_by_address(RankTensor(x.shards.values()))


def add_by_address_of_local_tensor(x: DTensor) -> None:
    """The same by PyTorch's private name of the local shard, which programs pass to their kernels."""
    add_by_address(x._local_tensor)  # type: ignore[attr-defined]


def add_by_address_of_checkpointed_shards(x: DTensor) -> None:
    """The same in the memory that torch.distributed.checkpoint reads and writes."""
    size = x.shape[1] // 4
    for rank in range(4):
        index = MetadataIndex("x", torch.Size((0, rank * size, 0)), None)
        add_by_address(RankTensor([x.__get_tensor_shard__(index)]))  # type: ignore[attr-defined]


def add_by_address_of_what_is_pickled(x: DTensor) -> None:
    """The same in the memory that torch.multiprocessing shares with another process."""
    add_by_address(x.__reduce_ex__(4)[1][0])  # type: ignore[index]


def give_other_data(x: DTensor) -> None:
    x.data = x + 1


WRITES = [
    add_in_place,
    add_in_part,
    add_in_a_rank,
    add_in_part_of_view,
    add_through_data,
    add_by_address_of_shards,
    add_by_address_of_local_tensor,
    add_by_address_of_checkpointed_shards,
    add_by_address_of_what_is_pickled,
    give_other_data,
]


@pytest.mark.parametrize("write", WRITES)
def test_what_was_written_is_read_anew(write: Callable[[DTensor], None]) -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        (plain,), (cut,) = weights(mesh, 1)
        data = torch.randn(1, ROWS, COLUMNS)
        x = distribute_tensor(data.clone(), mesh, [Shard(1)])
        with torch.no_grad():
            F.linear(x, cut)
            write(x)
            again = F.linear(x, cut)
            expected = F.linear(data + 1, plain)
        torch.testing.assert_close(again.full_tensor().shards[0], expected, rtol=1e-4, atol=1e-3)


def from_constructor(parts: Tensor, like: DTensor) -> DTensor:
    return DTensor(parts, like.spec)


def from_a_local_gradient(parts: Tensor, like: DTensor) -> DTensor:
    leaf = like.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(leaf.to_local(), leaf, parts)
    assert isinstance(gradient, DTensor)
    return gradient


@pytest.mark.parametrize("make", [from_constructor, from_a_local_gradient])
def test_memory_that_the_program_brought_is_watched(make: Callable[[Tensor, DTensor], DTensor]) -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        (plain,), (cut,) = weights(mesh, 1)
        data = torch.randn(ROWS, COLUMNS)
        parts = RankTensor([part.clone() for part in data.chunk(4)])
        x = make(parts, distribute_tensor(data, mesh, [Shard(0)]))
        with torch.no_grad():
            F.linear(x, cut)
            add_by_address(parts)
            again = F.linear(x, cut)
        expected = F.linear(data + 1, plain)
        torch.testing.assert_close(again.full_tensor().shards[0], expected, rtol=1e-4, atol=1e-3)


def test_memory_of_other_tensors_is_not_taken_for_memory_that_is_gone() -> None:
    for _ in range(200):
        local = torch.ones(4)
        watch = Watch(local)
        del local
        assert not watch.unchanged(torch.ones(4))  # whose storage may have got the id of the other


def test_a_part_that_was_handed_out_before_is_watched() -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        (plain,), (cut,) = weights(mesh, 1)
        data = torch.randn(1, ROWS, COLUMNS)
        x = distribute_tensor(data.clone(), mesh, [Shard(1)])
        part = x.view(ROWS, COLUMNS).to_local()
        with torch.no_grad():
            F.linear(x, cut)
            part.add_(1)
            again = F.linear(x, cut)
            expected = F.linear(data + 1, plain)
        torch.testing.assert_close(again.full_tensor().shards[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("cut_dim", [0, 1])
def test_pieces_of_one_tensor_are_not_confused(cut_dim: int) -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        (plain,), (cut,) = weights(mesh, 1)
        data = torch.randn(2 * ROWS, ROWS, COLUMNS)
        x = distribute_tensor(data, mesh, [Shard(cut_dim)])
        with torch.no_grad():
            for i in range(3):
                found = torch.mm(x[i], cut.t())
                torch.testing.assert_close(found.full_tensor().shards[0], data[i] @ plain.t(), rtol=1e-4, atol=1e-3)
                half = F.linear(x[i * 4 : i * 4 + 4], cut).full_tensor()
                expected = F.linear(data[i * 4 : i * 4 + 4], plain)
                torch.testing.assert_close(half.shards[0], expected, rtol=1e-4, atol=1e-3)


def test_a_shard_that_was_handed_out_is_never_trusted() -> None:
    """The address may be used at any time later, between any two ops."""
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        (plain,), (cut,) = weights(mesh, 1)
        data = torch.randn(1, ROWS, COLUMNS)
        x = distribute_tensor(data.clone(), mesh, [Shard(1)]) * 1
        shards = x.shards
        with torch.no_grad():
            F.linear(x, cut)
            for shard in shards.values():
                (ctypes.c_float * 1).from_address(shard.data_ptr())[0] = 7.0
            again = F.linear(x, cut)
            changed = data.clone()
            changed[0, ::2, 0] = 7.0
            expected = F.linear(changed, plain)
        torch.testing.assert_close(again.full_tensor().shards[0], expected, rtol=1e-4, atol=1e-3)


def test_nothing_is_kept_when_the_tensor_goes() -> None:
    import gc

    from shardwise.dispatch.gather_cache import _Active

    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        _, (cut,) = weights(mesh, 1)
        x = distribute_tensor(torch.randn(1, ROWS, COLUMNS), mesh, [Shard(1)])
        with torch.no_grad():
            F.linear(x, cut)
        assert _Active.cache.operand is not None
        del x
        gc.collect()
        assert _Active.cache.operand is None


def test_a_rank_that_looks_at_its_shard_does_not_communicate_alone() -> None:
    """A second gather on one rank alone, where `x.to_local()` was printed, would wait for the others for ever."""
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        (plain,), (cut,) = weights(mesh, 1)
        x = distribute_tensor(torch.randn(1, ROWS, COLUMNS), mesh, [Shard(1)]) * 1
        local: Any = x._local_shard

        def twice() -> None:
            with torch.no_grad():
                F.linear(x, cut)
                mark_exposed(local.shards[0])
                F.linear(x, cut)

        assert collectives(twice) == {"all_gather_into_tensor": 1}
        assert collectives(twice) == {}
        (ctypes.c_float * 1).from_address(local.shards[0].data_ptr())[0] = 7.0
        assert collectives(twice) == {"all_gather_into_tensor": 1}
        expected = F.linear(x.full_tensor().shards[0], plain)
        torch.testing.assert_close(F.linear(x, cut).full_tensor().shards[0], expected, rtol=1e-4, atol=1e-3)


def test_an_entry_may_be_dropped_while_another_thread_empties_the_cache() -> None:
    class Emptied(GatherCache):
        """Another thread empties the cache after the first look at its entry."""

        @property
        def operand(self) -> GatheredOperand | None:  # type: ignore[override]
            return self.seen.pop(0)

        @operand.setter
        def operand(self, value: GatheredOperand | None) -> None:
            self.seen = [value]

    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]) * 1
        cache = Emptied()
        cache.keep(x, x._spec.replicated(), x._local_shard.clone())
        (entry,) = cache.seen
        cache.seen.append(None)
        cache._drop(entry.root)
        assert cache.seen == [None]
