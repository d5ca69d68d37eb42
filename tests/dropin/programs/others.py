"""DistributedDataParallel around tensor parallel, checkpoints, and a pipeline, all of PyTorch."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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
    """Saved with one sharding, loaded with another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.arange(35.0).view(7, 5)
    saved = distribute_tensor(value, mesh, [Shard(0), Shard(1)])
    dcp.save({"value": saved, "plain": torch.ones(3)}, checkpoint_id=folder)
    state = {"value": distribute_tensor(torch.zeros(7, 5), mesh, [Replicate(), Shard(0)]), "plain": torch.zeros(3)}
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["value"].full_tensor(), value)
    assert torch.equal(state["plain"], torch.ones(3))


def pipeline():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage_index = mesh.get_local_rank("pp")
    blocks = [new_model() for _ in range(2)]
    reference = nn.Sequential(*[new_model() for _ in range(2)])
    block = parallelize_module(blocks[stage_index], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    stage = PipelineStage(block, stage_index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(1)
    batch, target = torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)
    losses = []
    output = schedule.step(batch) if stage_index == 0 else schedule.step(target=target, losses=losses)
    expected = reference(batch)
    nn.functional.mse_loss(expected, target).backward()
    if stage_index == 1:
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), reference[stage_index].get_parameter(name).grad, rtol=1e-4, atol=1e-5
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data_parallel_of_tensor_parallel()
    checkpoint(sys.argv[1])
    pipeline()
    print(f"rank {dist.get_rank()}: all equal to one device, with {DTensor.__module__}")
    dist.destroy_process_group()
