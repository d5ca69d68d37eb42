"""The private names behind `_torch.modules`."""

import torch
from torch import nn

from shardwise._torch.modules import buffers_of, modules_of, parameters_of


def test_a_module_reads_what_is_written_to_its_dicts() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert list(modules_of(module)) == ["0"]
    assert parameters_of(module) == {}
    linear = module[0]
    assert list(parameters_of(linear)) == ["weight", "bias"]
    parameters_of(linear)["weight"] = torch.zeros(2, 2)  # type: ignore[assignment]  # no Parameter
    parameters_of(linear)["bias"] = None
    assert module(torch.ones(1, 2)).tolist() == [[0, 0]]
    linear.register_buffer("scale", torch.ones(1))
    buffers_of(linear)["scale"] = torch.zeros(1)
    assert linear.scale.item() == 0
    replaced = nn.Identity()
    modules_of(module)["0"] = replaced
    assert module[0] is replaced
