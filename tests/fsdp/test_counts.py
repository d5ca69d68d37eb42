"""What fully_shard communicates, and how much it holds."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DTensor, RankTensor, Shard, distribute_tensor, init_device_mesh, replicate
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError
from shardwise.fsdp import Event, fully_shard, schedule
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.fsdp.models import batches, full, loss_of, new_model, shard
from tests.worlds import fake_group, mesh_of


def even_block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def step(model: nn.Module, mesh: DeviceMesh) -> CommDebugMode:
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)] * mesh.ndim)
    with CommDebugMode() as counted:
        model(x).sum().backward()
    return counted


def kinds(counted: CommDebugMode) -> list[tuple[str, bool]]:
    return [(collective.kind, collective.moment.backward) for collective in counted.collectives]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_block_makes_one_gather_for_each_pass_and_one_reduction(keeps: bool) -> None:
    with mesh_of(8, names=("dp",)) as mesh:
        block = even_block()
        nbytes = sum(parameter.nbytes for parameter in block.parameters())
        fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
        step(block, mesh)
        counted = step(block, mesh)
        again = [] if keeps else [("all-gather", True)]
        assert kinds(counted) == [("all-gather", False), *again, ("reduce-scatter", True)]
        # A rank receives all of the parameters but its own eighth.
        assert [collective.received for collective in counted.collectives] == [nbytes * 7 // 8] * len(kinds(counted))


def test_replicas_add_one_all_reduce() -> None:
    with mesh_of(2, 4, names=("replicate", "dp")) as mesh:
        block = fully_shard(even_block(), mesh=mesh, reshard_after_forward=True)
        step(block, mesh)
        expected = [("all-gather", False), ("all-gather", True), ("reduce-scatter", True), ("all-reduce", True)]
        assert kinds(step(block, mesh)) == expected


def test_the_schedule_prefetches_and_holds_two_blocks() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(blocks=4), mesh)
        for tokens in batches(2):
            loss_of(model, distribute_tensor(tokens, mesh, [Shard(0)])).backward()
        events = [event for event in schedule(model) if event.group != "(root)"]
        one_after_the_other = [0, 1, 2, 3]
        gathered = [event for event in events if event.action in ("gather", "prefetch")]
        assert gathered == [
            *(Event("forward", f"blocks.{i}", "prefetch") for i in one_after_the_other),
            *(Event("backward", f"blocks.{i}", "prefetch") for i in reversed(one_after_the_other)),
        ]
        reduced = [event.group for event in events if event.action == "reduce"]
        assert reduced == [f"blocks.{i}" for i in reversed(one_after_the_other)]
        assert schedule(model).most_gathered() == 3  # two blocks, and the root around them
        assert "backward  blocks.0  reduce" in str(schedule(model))


def test_parameters_that_neighbours_keep_are_gathered_from_them() -> None:
    with mesh_of(8, names=("dp",)) as mesh:
        block = even_block()
        expected = copy.deepcopy(block)
        nbytes = sum(parameter.nbytes for parameter in block.parameters())
        fully_shard(block, mesh=mesh, reshard_after_forward=2)
        step(block, mesh)
        block.zero_grad()
        torch.manual_seed(0)
        counted = step(block, mesh)
        assert kinds(counted) == [("all-gather", False), ("all-gather", True), ("reduce-scatter", True)]
        assert [collective.received for collective in counted.collectives] == [
            nbytes * 7 // 8,
            nbytes // 2,
            nbytes * 7 // 8,
        ]
        torch.manual_seed(0)
        expected(torch.randn(8, 16)).sum().backward()
        torch.testing.assert_close(full(block[0].weight.grad), expected[0].weight.grad)
        with pytest.raises(InputError, match=r"reshard_after_forward=3, with 8 ranks.*\[2, 4\]"):
            fully_shard(even_block(), mesh=mesh, reshard_after_forward=3)


def test_a_rank_holds_its_share_and_two_blocks() -> None:
    """Counted in all memory that this process holds for rank 0, while blocks compute."""
    dim, count, ranks = 64, 6, 8
    gc.collect()
    elsewhere = bytes_of_rank(0)
    with mesh_of(ranks, names=("dp",)) as mesh:
        model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(count)))
        of_block = sum(parameter.nbytes for parameter in model[0].parameters())
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = distribute_tensor(torch.randn(ranks, dim), mesh, [Shard(0)])
        held: list[int] = []
        for block in model:
            block.register_forward_hook(lambda *_: held.append(bytes_of_rank(0) - elsewhere))
        for _ in range(2):
            held.clear()
            before = bytes_of_rank(0) - elsewhere
            model(x).sum().backward()
            model.zero_grad()
        share = count * of_block // ranks
        assert before == share + x.to_local().shards[0].nbytes
        activations = 2 * count * dim * 4
        assert max(held) <= share + 2 * of_block + activations
        # In backward the gradients of two blocks come on top: one is computed while the other is reduced.
        assert schedule(model).most_gathered() == 2


class Copies(TorchDispatchMode):
    """Lists ops that move data from one place to another."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        space, name = func._schema.name.split("::")
        if space == "aten" and any(part in name for part in ("copy", "clone", "cat", "stack")):
            self.ops.append(f"{name} of {list(args[0].shape)}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("rows", [16, 15])
def test_no_copies_where_sizes_are_even(distributed: bool, rows: int) -> None:
    """Rank 0 of a group that moves nothing, so that all ops are those of one rank."""
    with fake_group(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(rows, 32), nn.ReLU(), nn.Linear(32, rows))
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        local = torch.randn(2, rows)
        x = DTensor.from_local(local, mesh, [Shard(0)]) if distributed else local
        for _ in range(2):
            out = model(x)
            gradient = torch.ones_like(out)
            with Copies() as copies:
                out.backward(gradient)
        # The last layer has 15 rows: its weight and its bias get an unused one, so that all ranks send as much.
        assert copies.ops == (["copy_ of [15, 32]", "copy_ of [15]"] if rows == 15 else [])


def bytes_of_rank(rank: int) -> int:
    """The bytes of all memory of a simulated rank that any tensor of this process still uses."""
    storages = {}
    for tensor in gc.get_objects():
        if type(tensor) is RankTensor:
            storage = tensor.shards[rank].untyped_storage()
            storages[storage._cdata] = storage.size()
    return sum(storages.values())


@pytest.mark.parametrize("style", ["fully_shard", "hybrid", "replicate", "tensor parallel"])
def test_an_axis_of_one_rank_communicates_nothing(style: str) -> None:
    x = torch.randn(8, 16)
    torch.manual_seed(0)
    plain = even_block()
    block = copy.deepcopy(plain)
    plain(x).sum().backward()
    with mesh_of(1, 1, 2, names=("a", "b", "c")) as mesh, CommDebugMode() as counted:
        if style == "fully_shard":
            fully_shard(block, mesh=mesh["a"], reshard_after_forward=True)
        elif style == "hybrid":
            fully_shard(block, mesh=mesh["a", "b"])
        elif style == "replicate":
            replicate(block, mesh=mesh["a"])
        else:
            parallelize_module(block, mesh["a"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(block.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            block(x).sum().backward()
        norm = nn.utils.clip_grad_norm_(block.parameters(), 1e9)
        for one, other in zip(block.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(one.grad), other.grad)
        optimizer.step()
        assert float(full(norm)) == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])))
    assert counted.collectives == []
