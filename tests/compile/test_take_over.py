"""`torch.compile` in a program for PyTorch's DTensor, with shardwise in its place."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))


def function(x, y):
    local = DTensor.from_local(x, mesh, [Shard(0)], run_check=False) * 2
    return (local + y).redistribute(mesh, [Replicate()]).to_local().sum()


mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
y = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
for run, arguments in ((function, [torch.randn(4, 4, requires_grad=True), y]), (mlp, [torch.randn(4, 8)])):
    found = []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        y.grad = None
        mlp.zero_grad()
        result = call(*arguments)
        result.sum().backward()
        leaves = [*arguments, *mlp.parameters()]
        found.append([result, *(None if leaf.grad is None else torch.as_tensor(leaf.grad) for leaf in leaves)])
    for eager, compiled in zip(*found):
        assert (eager is None) == (compiled is None)
        if eager is not None:
            one, other = (v.to_local() if isinstance(v, DTensor) else v for v in (eager, compiled))
            torch.testing.assert_close(one, other)
print("compiled by", DTensor.__module__)
"""


def test_a_program_for_pytorch() -> None:
    start = f"import shardwise; shardwise.install()\n{PROGRAM}"
    command = [sys.executable, "-W", "ignore", "-c", start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled by shardwise" in done.stdout
