"""fully_shard, gradient clipping, AdamW and the state-dict helpers of PyTorch: 1-D, HSDP and with tensor parallel."""

import checks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN = 16
INNER = 63  # uneven over 2 and 4 ranks


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN)) for _ in range(2)]
    )


def sharded(kind):
    """The model wrapped by fully_shard, and this rank's share of the batch."""
    model = new_model()
    world, rank = dist.get_world_size(), dist.get_rank()
    if kind == "1-D":
        mesh = init_device_mesh("cpu", (world,))
        share = world, rank
    elif kind == "HSDP":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        share = world, rank
    else:
        whole = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        mesh = whole["dp"]
        share = 2, mesh.get_local_rank()
        for block in model:
            parallelize_module(block, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), share


def step(model, optimizer, batch):
    model(batch).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def assert_same_state(found, expected, what):
    assert found.keys() == expected.keys(), (what, found.keys(), expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{what} {n}: {m}")


def run(kind):
    model, (shares, mine) = sharded(kind)
    reference = new_model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    torch.manual_seed(1)
    for _ in range(3):
        batch = torch.randn(8, HIDDEN)
        norm = step(model, optimizers[0], batch.chunk(shares)[mine])
        torch.testing.assert_close(norm, step(reference, optimizers[1], batch), rtol=1e-4, atol=1e-5)
    full = StateDictOptions(full_state_dict=True)
    assert_same_state(get_model_state_dict(model, options=full), reference.state_dict(), kind)
    moments = get_optimizer_state_dict(model, optimizers[0], options=full)["state"]
    for name, parameter in reference.named_parameters():
        expected = optimizers[1].state[parameter]["exp_avg"]
        torch.testing.assert_close(moments[name]["exp_avg"], expected, rtol=1e-4, atol=1e-5)
    load(kind, reference, optimizers[1])


def load(kind, reference, reference_optimizer):
    """A fresh sharded model takes the plain model's state, from every rank or from rank 0, and trains on alike."""
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        has_state = not broadcast or dist.get_rank() == 0
        weights, moments = get_state_dict(reference, reference_optimizer)
        model, _ = sharded(kind)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        set_model_state_dict(model, weights if has_state else {}, options=options)
        set_optimizer_state_dict(model, optimizer, moments if has_state else {}, options=options)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_same_state(found, reference.state_dict(), kind)
        first = next(model.parameters())
        assert optimizer.state[first]["exp_avg"].placements == first.placements


if __name__ == "__main__":
    kinds = {"over one axis": "1-D", "HSDP": "HSDP", "over dp of tensor parallel": "dp x tp"}
    checks.run({f"fully_shard {text}, state dicts": lambda _, k=kind: run(k) for text, kind in kinds.items()})
