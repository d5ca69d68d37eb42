"""PyTorch's functions that gather and distribute state dicts, and what is relied on."""

from __future__ import annotations

import inspect

import pytest
import torch

from shardwise._torch.python_functions import Place
from shardwise._torch.state_dicts import distributing_functions, gathering_functions, non_persistent_buffers


@pytest.mark.parametrize("place", gathering_functions(), ids=str)
def test_gathering(place: Place) -> None:
    gather = inspect.unwrap(getattr(place.owner, place.name))
    state = {"a": torch.ones(2), "b": {"c": [torch.ones(3), 4]}}
    assert str(gather(state, cpu_offload=True)) == str(state)


@pytest.mark.parametrize("place", distributing_functions(), ids=str)
def test_distributing(place: Place) -> None:
    distribute = inspect.unwrap(getattr(place.owner, place.name))
    assert list(inspect.signature(distribute).parameters)[:2] == ["full_state_dict", "local_state_dict"]


def test_what_is_no_dtensor_is_replaced_by_a_full_tensor() -> None:
    place = distributing_functions()[-1]
    full, local = {"a": torch.ones(2), "b": torch.tensor(3.0)}, {"a": torch.zeros(2), "b": torch.tensor(0.0)}
    inspect.unwrap(getattr(place.owner, place.name))(full, local, device=torch.device("cpu"))
    assert local == {"a": pytest.approx([1.0, 1.0]), "b": torch.tensor(3.0)}


def test_buffers_that_a_state_dict_leaves_out() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("computed", torch.ones(2), persistent=False)
    assert non_persistent_buffers(module) == {"computed"}
    assert list(module.state_dict()) == ["kept"]
