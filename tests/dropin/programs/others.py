"""DistributedDataParallel around tensor parallel, and checkpoints, all of PyTorch."""

import checks
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

HIDDEN = 16


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))


def data_parallel_of_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = new_model(), new_model()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, reference)]
    torch.manual_seed(1)
    for _ in range(3):
        batch = torch.randn(8, HIDDEN)
        for module, optimizer, part in (
            (wrapped, optimizers[0], batch.chunk(2)[mesh.get_local_rank("dp")]),
            (reference, optimizers[1], batch),
        ):
            optimizer.zero_grad()
            module(part).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(wrapped(batch), reference(batch), rtol=1e-4, atol=1e-5)


def checkpoint(folder):
    """Saved on one mesh, and loaded on others with other placements; also saved in the background."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    value = torch.arange(35.0).view(7, 5)
    saved = distribute_tensor(value, square, [Shard(0), Shard(1)])
    state = {"value": saved, "plain": torch.ones(3), "step": 3}
    dcp.save(state, checkpoint_id=folder / "one")
    dcp.async_save(state, checkpoint_id=folder / "two").result()
    for name in ("one", "two"):
        for mesh, placements in ((square, [Replicate(), Shard(0)]), (square, [Shard(1), Shard(0)]), (line, [Shard(0)])):
            found = {
                "value": distribute_tensor(torch.zeros(7, 5), mesh, placements),
                "plain": torch.zeros(3),
                "step": 0,
            }
            dcp.load(found, checkpoint_id=folder / name)
            assert torch.equal(found["value"].full_tensor(), value)
            assert found["value"].placements == tuple(placements)
            assert torch.equal(found["plain"], torch.ones(3))
            assert found["step"] == 3


if __name__ == "__main__":
    checks.run(
        {
            "DistributedDataParallel around tensor parallel": lambda _: data_parallel_of_tensor_parallel(),
            "checkpoint: save, async_save, load on another mesh": checkpoint,
        }
    )
