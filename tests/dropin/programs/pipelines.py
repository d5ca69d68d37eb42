"""Stages of torch.distributed.pipelining with tensor parallel or fully_shard inside, and what they pass on."""

import inspect

import checks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN = 8
PASSED = {"local tensors": None, "replicated DTensors": Replicate(), "DTensors, sharded unevenly": Shard(1)}
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "interleaved 1F1B": ScheduleInterleaved1F1B}
PASSES_DTENSORS = "get_mesh" in inspect.signature(PipelineStage.__init__).parameters  # not in older versions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def new_blocks(count):
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def loss_fn(output, target):
    loss = (output - target).square().mean()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def tensor_parallel(block, mesh, passed):
    if passed is None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    else:
        up = ColwiseParallel(input_layouts=passed, use_local_output=False)
        plan = {"up": up, "down": RowwiseParallel(output_layouts=passed, use_local_output=False)}
    return parallelize_module(block, mesh, plan)


def data_parallel(block, mesh, passed):
    return fully_shard(block, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pipeline(new_schedule, parallelize, passed):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
    inner, rank = mesh["inner"], mesh.get_local_rank("pp")
    count = 4 if new_schedule is ScheduleInterleaved1F1B else 2
    blocks, reference = new_blocks(count), nn.Sequential(*new_blocks(count))
    own = range(rank, count, 2)
    named = {"get_mesh": lambda *_, **__: inner} if PASSES_DTENSORS else {}
    stages = [
        PipelineStage(
            parallelize(blocks[index], inner, passed),
            index,
            count,
            torch.device("cpu"),
            group=mesh.get_group("pp"),
            **named,
        )
        for index in own
    ]
    schedule = new_schedule(stages if count > 2 else stages[0], n_microbatches=2, loss_fn=loss_fn)
    torch.manual_seed(1)
    batch, target = torch.randn(4, 5, HIDDEN), torch.randn(4, 5, HIDDEN)
    given = [batch, target]
    if passed is not None:
        given = [distribute_tensor(x, inner, [passed]) for x in given]
    elif parallelize is data_parallel:
        given = [x.chunk(2)[mesh.get_local_rank("inner")] for x in given]
    for _ in range(2):
        for block in blocks:
            block.zero_grad()
        output = schedule.step(given[0]) if rank == 0 else schedule.step(target=given[1], losses=[])
    expected = reference(batch)
    loss_fn(expected, target).backward()
    if rank == 1 and parallelize is tensor_parallel:
        torch.testing.assert_close(whole(output), expected, rtol=1e-4, atol=1e-5)
    for index in own:
        for name, parameter in blocks[index].named_parameters():
            gradient = reference[index].get_parameter(name).grad
            torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-4, atol=1e-5)


def all_checks():
    for name, schedule in SCHEDULES.items():
        for what, passed in PASSED.items():
            if passed is None or PASSES_DTENSORS:
                title = f"pipelining of tensor parallel, {name}, {what}"
                yield title, lambda _, given=(schedule, tensor_parallel, passed): pipeline(*given)
        yield f"pipelining of fully_shard, {name}", lambda _, kind=schedule: pipeline(kind, data_parallel, None)


if __name__ == "__main__":
    checks.run(dict(all_checks()))
