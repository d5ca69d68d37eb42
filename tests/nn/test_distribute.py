"""distribute_module on modules that list their parameters, or hold one parameter under several names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import DTensor, Replicate, distribute_module, distribute_tensor
from shardwise.errors import InputError
from tests.ops.helpers import ranks
from tests.training.parameters import whole_of


def test_a_module_that_lists_its_weights() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4, num_layers=2)
    x = torch.randn(3, 2, 4)
    expected = lstm(x)[0].detach()
    with ranks(2) as mesh:
        distribute_module(lstm, mesh)
        assert all(isinstance(parameter, DTensor) for parameter in lstm.parameters())
        found = lstm(distribute_tensor(x, mesh, [Replicate()]))[0]
        torch.testing.assert_close(whole_of(found.detach()), expected)


def test_lists_and_dicts_of_parameters_keep_their_order() -> None:
    module = nn.Module()
    module.several = nn.ParameterList(nn.Parameter(torch.full((2,), float(i))) for i in range(3))
    module.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(1)), "a": nn.Parameter(torch.zeros(1))})
    names = [name for name, _ in module.named_parameters()]
    with ranks(2) as mesh:
        distribute_module(module, mesh)
        assert [name for name, _ in module.named_parameters()] == names
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
        assert [whole_of(parameter.detach())[0].item() for parameter in module.several] == [0, 1, 2]


def test_one_parameter_under_two_names_of_one_module() -> None:
    module = nn.Module()
    module.first = nn.Parameter(torch.ones(2))
    module.second = module.first
    with ranks(2) as mesh:
        distribute_module(module, mesh)
        assert isinstance(module.first, DTensor)
        assert module.second is module.first


def test_hooks_of_two_arguments() -> None:
    x = torch.randn(4, 4)
    module = nn.Linear(4, 4)
    expected = module(2 * x).detach() + 1
    with ranks(2) as mesh:
        with pytest.warns(FutureWarning, match="_fn of two arguments is deprecated"):
            distribute_module(module, mesh, None, lambda inputs, mesh: inputs[0] * 2, lambda output, mesh: output + 1)
        found = module(distribute_tensor(x, mesh, [Replicate()]))
        torch.testing.assert_close(whole_of(found.detach()), expected)
        with pytest.raises(InputError, match="input_fn takes 1 arguments"):
            distribute_module(module, mesh, None, lambda inputs: inputs)
