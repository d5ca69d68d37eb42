"""Nothing of a simulated world is left when it has ended and Python has collected garbage once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor, erase, init_device_mesh, simulate
from shardwise.debug import CommDebugMode, explain
from shardwise.errors import CommunicationError
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.sharding.mesh import mesh_info_of
from shardwise.sharding.runtime import runtime_of_world

Program = Callable[[DeviceMesh], object]
PROGRAMS: dict[str, Program] = {}
POOL = ThreadPoolExecutor(1)
"""A thread that outlives the worlds it works in."""


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


def on(mesh: DeviceMesh, *shape: int, dim: int = 0) -> DTensor:
    return distribute_tensor(torch.ones(shape), mesh, [Shard(dim)]).requires_grad_()


def train(mesh: DeviceMesh) -> None:
    x = on(mesh, 8, 8)
    with shardwise.implicit_replication():
        (x + torch.ones(8, 8)).cumprod(0).sum().backward()
    with shardwise.accumulate_gradients():
        F.linear(x, x).sum().backward()


def step_with(make: Callable[..., torch.optim.Optimizer], **options: bool) -> Program:
    def run(mesh: DeviceMesh) -> None:
        model = distribute_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh)
        optimizer = make(model.parameters(), **options)
        for _ in range(2):
            model(on(mesh, 8, 8)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.state_dict()

    return run


for foreach in (False, True):
    PROGRAMS[f"adamw, foreach={foreach}"] = step_with(torch.optim.AdamW, foreach=foreach)
PROGRAMS["adamw, fused"] = step_with(torch.optim.AdamW, fused=True)


@program
def graph_that_is_held(mesh: DeviceMesh) -> object:
    x = on(mesh, 8, 8)
    loss = checkpoint(lambda y: (y @ y).softmax(0), x, use_reentrant=False).sum()
    loss.backward(retain_graph=True)
    return loss.grad_fn is not None


@program
def views_and_writes(mesh: DeviceMesh) -> None:
    x = on(mesh, 8, 8) * 1
    x.view(-1)[3:17].mul_(2)
    x.to_local().add_(1)
    x.sum().backward()


@program
def random_numbers(mesh: DeviceMesh) -> None:
    x = on(mesh, 8, 8).detach()
    F.dropout(x)
    x.normal_()
    x.uniform_(generator=torch.Generator().manual_seed(1))


@program
def submeshes(mesh: DeviceMesh) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for each in (grid["dp"], grid["tp"], grid["dp", "tp"]._flatten("all")):
        on(each, 8, 8).full_tensor()
    on(mesh, 8, 8).redistribute(grid, [Shard(0), Shard(1)])


@program
def parallel_styles(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()})
    model(torch.ones(2, 8)).sum().backward()


@program
def sharded_data_parallel(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()


MASKS: list[BlockMask] = []


@program
def attention(mesh: DeviceMesh) -> None:
    """The block mask outlives the world."""
    q = on(mesh, 2, 4, 16, 8, dim=2)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    MASKS[:] = [create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu", BLOCK_SIZE=4)]
    flex_attention(q, q, q, block_mask=MASKS[0])


@program
def debug_tools(mesh: DeviceMesh) -> None:
    with CommDebugMode() as counted, explain() as found:
        train(mesh)
    assert counted.get_total_counts()
    assert str(found)


@erase
def _erased(x: Tensor) -> Tensor:
    return (x @ x).sum()


@program
def erased_step(mesh: DeviceMesh) -> None:
    """The step outlives the world."""
    for _ in range(2):
        _erased(on(mesh, 8, 8).detach())


@program
def errors_that_were_caught(mesh: DeviceMesh) -> None:
    x = on(mesh, 8, 8) * 1
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        x.sum().backward()
    with shardwise.explicit(), pytest.raises(CommunicationError):
        x + on(mesh, 8, 8, dim=1)


@program
def error_in_a_mode(mesh: DeviceMesh) -> None:
    """The error leaves the world with its traceback, which is dropped then."""
    with shardwise.implicit_replication():
        on(mesh, 8, 8) @ torch.ones(5, 5)


@program
def generator_that_is_suspended(mesh: DeviceMesh) -> None:
    def batches():
        with torch.no_grad():
            while True:
                yield on(mesh, 8, 8).sum()

    next(batches())


@program
def threads(mesh: DeviceMesh) -> None:
    own = [threading.Thread(target=train, args=(mesh,)) for _ in range(3)]
    for thread in own:
        thread.start()
    POOL.submit(train, mesh).result(30)
    for thread in own:
        thread.join()


SHARDS: list[Tensor] = []


@program
def gathered_and_handed_out(mesh: DeviceMesh) -> None:
    """The local shards outlive the world."""
    x = on(mesh, 8, 8).detach()
    SHARDS[:] = [x.to_local(), F.linear(x, x).to_local(), x.redistribute(placements=[Replicate()]).to_local()]


@program
def world_in_a_world(mesh: DeviceMesh) -> None:
    with simulate(2):
        train(init_device_mesh("cpu", (2,)))
    train(mesh)


def remains_of(run: Program) -> list[weakref.ref[object]]:
    """Run a program in a world. Returns weak references to the world's runtime and to the MeshInfos of its meshes."""
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        mesh_info_of(mesh)
        try:
            run(mesh)
        except RuntimeError:
            assert run is error_in_a_mode
        runtime = runtime_of_world()
        return [weakref.ref(each) for each in (runtime, *runtime.meshes.values())]


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_collection_frees_a_world(name: str) -> None:
    remains = remains_of(PROGRAMS[name])
    gc.collect()
    assert [each() for each in remains] == [None] * len(remains)
