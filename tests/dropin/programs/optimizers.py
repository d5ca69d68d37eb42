"""Optimizers on the parameters of fully_shard and of tensor parallel: PyTorch's, and those of pytorch_optimizer."""

from functools import partial

import checks
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN = 16
KINDS = ("fully_shard", "tensor parallel", "fully_shard x tensor parallel")


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))


def distributed_model(kind):
    """The model, the number of shares of a batch, and which one is ours."""
    model, world = new_model(), dist.get_world_size()
    if kind == "fully_shard":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,))), world, dist.get_rank()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "tensor parallel":
        return parallelize_module(model, init_device_mesh("cpu", (world,)), plan), 1, 0
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"]), 2, mesh.get_local_rank("dp")


def train(kind, new_optimizer, tolerance, _folder):
    model, shares, mine = distributed_model(kind)
    reference = new_model()
    optimizers = [new_optimizer(m) for m in (model, reference)]
    data = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = torch.randn(8, HIDDEN, generator=data)
        for module, optimizer, part in (
            (model, optimizers[0], batch.chunk(shares)[mine]),
            (reference, optimizers[1], batch),
        ):
            optimizer.zero_grad()
            module(part).pow(2).mean().backward()
            torch.manual_seed(2)
            optimizer.step()
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            found.full_tensor(), expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def with_muon(name):
    """An optimizer of pytorch_optimizer that orthogonalises the updates of matrices."""

    def new(model):
        vectors = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": matrices(model), "use_muon": True}, {"params": vectors, "use_muon": False}]
        return getattr(pytorch_optimizer, name)(groups, lr=1e-2)

    return new


OF_PYTORCH = {
    "AdamW, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "SGD with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "Muon": lambda m: torch.optim.Muon(matrices(m), lr=1e-2),
}
OF_LIBRARY = {
    "Muon": with_muon("Muon"),
    "AdaBelief": lambda m: pytorch_optimizer.AdaBelief(m.parameters(), lr=1e-2),
    "Lion": lambda m: pytorch_optimizer.Lion(m.parameters(), lr=1e-3),
    "ScheduleFreeAdamW": lambda m: pytorch_optimizer.ScheduleFreeAdamW(m.parameters(), lr=1e-2),
}


if __name__ == "__main__":
    found = {}
    for library, optimizers in (("torch.optim", OF_PYTORCH), ("pytorch_optimizer", OF_LIBRARY)):
        for name, new in optimizers.items():
            for kind in KINDS:
                tolerance = 3e-3 if name == "Muon" else 1e-4  # Muon's matrix products are in bfloat16
                found[f"{library}: {name}, {kind}"] = partial(train, kind, new, tolerance)
    checks.run(found)
