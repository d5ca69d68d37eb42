"""The example's training on processes: erased, it computes the same numbers as it is written."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

from shardwise import P, bucket_gradients, distribute_tensor, erase, init_device_mesh
from tests.processes.pool import on_processes

STEPS = 20


def load_example():
    spec = importlib.util.spec_from_file_location("train_example", Path(__file__).parents[2] / "examples" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(example, mesh, **options):
    """The losses of 20 steps with dropout, clipping, AdamW and a schedule, the parameters after them, and the step."""
    torch.manual_seed(0)
    model: nn.Module = example.distribute(example.GPT(width=16, layers=1, length=16, dropout=0.1), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(tokens, targets):
        return example.train_step(model, optimizer, tokens, targets)

    if options:
        step = erase(step, **options)
    torch.manual_seed(5)
    losses = []
    for batch in example.batches(STEPS, 4, model.length):
        losses.append(step(*(distribute_tensor(x, mesh, P("dp")) for x in batch)).full_tensor())
        scheduler.step()
    return torch.stack(losses), [p.detach().full_tensor() for p in model.parameters()], step


@on_processes
def test_twenty_steps_of_the_example():
    example = load_example()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with bucket_gradients(None):  # a collective adds up the gradients of a bucket in another order
        losses, parameters, _ = trained(example, mesh)
    found, same, step = trained(example, mesh, passes=("dead", "duplicates", "views"))
    assert step.recordings == 1
    assert torch.equal(losses, found)
    assert all(map(torch.equal, parameters, same))
    found, close, step = trained(example, mesh, backend="eager")
    assert step.recordings == 1
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-4)
    for one, other in zip(close, parameters, strict=True):  # sums in another order, and Adam divides by small numbers
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-3)
    assert "all_reduce_coalesced over dp" in step.explain()
