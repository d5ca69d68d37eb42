"""Modules with all that a file may hold: shared weights, fused ones, buffers of both kinds, vectors and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise import DTensor, RankTensor


class Net(nn.Module):
    def __init__(self, rows: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 6)
        self.fused = nn.Linear(6, 24)  # blocks of [gate; up]
        self.scale = nn.Parameter(torch.ones(5))
        self.number = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(6, rows, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("order", torch.arange(7))


def net(seed: int = 0, rows: int = 10) -> Net:
    torch.manual_seed(seed)
    model = Net(rows)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        model.count.fill_(42)
    return model


def stored(model: nn.Module, folder: Path) -> Path:
    """A folder with the weights of a model, written by safetensors itself; shared ones once."""
    folder.mkdir(exist_ok=True)
    found = {id(tensor): (key, tensor) for key, tensor in reversed(model.state_dict(keep_vars=True).items())}
    save_file({key: tensor.detach().clone() for key, tensor in found.values()}, folder / "model.safetensors")
    return folder


def plain(tensor: Any) -> Tensor:
    """The global value, the same on all ranks."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if isinstance(tensor, RankTensor):
        assert all(torch.equal(shard, tensor.shards[0]) for shard in tensor.shards)
        return tensor.shards[0]
    return tensor


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """Parameters and buffers, persistent or not, are equal bit by bit, and have the same dtypes."""
    for kind in ("named_parameters", "named_buffers"):
        ours = dict(getattr(found, kind)(remove_duplicate=False))
        theirs = dict(getattr(expected, kind)(remove_duplicate=False))
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(plain(ours[name]), tensor.detach()), name
