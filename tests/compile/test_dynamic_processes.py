"""Batches of many sizes on processes, where collectives move data and uneven shards differ between ranks."""

from __future__ import annotations

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise import DTensor, Replicate, Shard, init_device_mesh
from tests.compile.test_dynamic import moves
from tests.processes.pool import on_processes


@on_processes
def test_batches_of_many_sizes() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: DTensor) -> torch.Tensor:
        return moves(x) * x.mean()

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for size in (8, 16, 12, 7):
        torch.manual_seed(size)
        full = torch.randn(size, 8)
        x = DTensor.from_local(full, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        torch.testing.assert_close(compiled(x).full_tensor(), full * 3 * full.mean(), rtol=1e-5, atol=1e-5)
        assert counter.frame_count <= (3 if size == 7 else 2)
