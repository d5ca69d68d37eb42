"""Parts of PyTorch that know distributed tensors of its own class only: ours get the right result, or a clear error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn.functional as differentiable_collectives
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, shard_parameters
from shardwise.errors import InputError
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, mesh_of


def sharded(mesh: Any, placement: Any) -> nn.Module:
    return shard_parameters(nn.Linear(6, 8), mesh, [placement])


COLLECTIVES = {
    "all_reduce": dist.all_reduce,
    "reduce": lambda x: dist.reduce(x, 0),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([x] * 4, x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(32), x),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.empty(2), x),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty(8), x),
    "all_to_all": lambda x: dist.all_to_all([torch.empty(8) for _ in range(4)], [x] * 4),
    "gather": lambda x: dist.gather(x, [torch.empty(8)] * 4 if dist.get_rank() == 0 else None, 0),
    "scatter": lambda x: dist.scatter(x, [torch.empty(8)] * 4 if dist.get_rank() == 0 else None, 0),
    "send": lambda x: dist.send(x, (dist.get_rank() + 1) % 4),
    "recv": lambda x: dist.recv(x, (dist.get_rank() + 1) % 4),
    "batch_isend_irecv": lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (dist.get_rank() + 1) % 4)]),
    "functional all_reduce": lambda x: functional_collectives.all_reduce(x, "sum", x.device_mesh),
    "differentiable all_reduce": differentiable_collectives.all_reduce,
    "differentiable all_gather": differentiable_collectives.all_gather,
}


@on_processes
def test_collectives_on_distributed_tensors_are_refused() -> None:
    """On all ranks, before anything is sent."""
    x = distribute_tensor(torch.arange(8.0), mesh_of(4), [Shard(0)])
    for name, call in COLLECTIVES.items():
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            try:
                call(x)
            except InputError as error:
                text = str(error)
            except Exception as error:
                text = repr(error)
            else:
                text = "no error"
        assert "communicates local tensors between ranks, and was called with the DTensor f32[8@a]" in text, (
            name,
            text,
        )


@on_processes
def test_collectives_on_local_tensors() -> None:
    x = distribute_tensor(torch.arange(8.0), mesh_of(4), [Shard(0)])
    dist.all_reduce(x.to_local())
    assert_same(x.to_local(), torch.tensor([12.0, 16.0]))


@on_processes
def test_fully_shard_of_distributed_parameters_is_refused() -> None:
    """PyTorch's function knows its own class only, and would shard the wrapper as if it were a plain tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placement in (Shard(0), Replicate()):
        with pytest.raises(InputError, match=r"fully_shard got the parameter f32.* shardwise\.install\(\)"):
            fully_shard(sharded(mesh["tp"], placement), mesh=mesh["dp"])


@on_processes
def test_optimizers_that_shard_their_state_are_refused() -> None:
    with warnings.catch_warnings(action="ignore"):  # of torch.jit.script, which it uses
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = sharded(mesh_of(4), Shard(0))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(distribute_tensor(torch.ones(2, 6), mesh_of(4), [Replicate()])).sum().backward()
    with pytest.raises(InputError, match="communicates local tensors between ranks"):
        optimizer.step()
