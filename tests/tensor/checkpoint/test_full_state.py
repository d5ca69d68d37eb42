"""PyTorch's `get_state_dict` and `set_state_dict` with full tensors: gathered, and distributed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils import _pytree as pytree

import shardwise
import shardwise.parallel
from shardwise import DTensor, InterleavedShard, P, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.world import common
from tests.dropin.programs import state_dicts
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.tensor.checkpoint.training import Training, assert_bitwise, wholes

FULL = StateDictOptions(full_state_dict=True)


def plain(state: Any) -> Any:
    """The state with one rank's copy of each tensor of a simulated world."""
    assert not any(isinstance(value, DTensor) for value in pytree.tree_leaves(state))
    return pytree.tree_map_only(Tensor, lambda tensor: common(tensor).clone(), state)


def specs(training: Training) -> list[Any]:
    return [value._spec for value in pytree.tree_leaves(training.state()) if isinstance(value, DTensor)]


def train_elsewhere(mesh: Any, full: dict[str, Any], wanted: dict[str, Any], options: StateDictOptions) -> None:
    """Load a full state into a training on another mesh, which then holds it with placements of its own."""
    training = Training(mesh, "AdamW")
    training.step()
    before = specs(training)
    set_model_state_dict(training.model, full["model"], options=options)
    set_optimizer_state_dict(training.model, training.optimizer, full["optimizer"], options=options)
    assert specs(training) == before
    assert_bitwise(wholes(training.state()), wanted)
    training.step()


def test_full_states_in_a_simulated_world() -> None:
    with shardwise.simulate(4):
        training = Training(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), "AdamW")
        training.step()
        wanted = wholes(training.state())
        model, optimizer = get_state_dict(training.model, training.optimizer, options=FULL)
        full = plain({"model": model, "optimizer": optimizer})
        assert_bitwise(wholes(full), wanted)
    with shardwise.simulate(3):
        train_elsewhere(init_device_mesh("cpu", (3,)), full, wanted, FULL)


@pytest.mark.parametrize("option", ["cpu_offload", "broadcast_from_rank0"])
def test_the_first_rank_alone_in_a_simulated_world(option: str) -> None:
    """All ranks share the objects of this process, so what the first one has, the others have."""
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        options = StateDictOptions(full_state_dict=True, **{option: True})
        full = plain(get_model_state_dict(module(mesh), options=options))
        other = module(mesh)
        set_model_state_dict(other, {name: 2 * value for name, value in full.items()}, options=options)
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter.detach().full_tensor().shards[3], 2 * full[name]), name


@on_processes
def test_full_states_on_processes() -> None:
    training = Training(mesh_of(2, 2), "AdamW")
    training.step()
    wanted = wholes(training.state())
    model, optimizer = get_state_dict(training.model, training.optimizer, options=FULL)
    full = plain({"model": model, "optimizer": optimizer})
    assert_bitwise(wholes(full), wanted)
    train_elsewhere(mesh_of(4), full, wanted, FULL)


@on_processes
def test_the_first_rank_alone_has_the_full_state() -> None:
    training = Training(mesh_of(2, 2), "AdamW")
    training.step()
    wanted = wholes(training.state())
    gathering = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = {
        "model": get_model_state_dict(training.model, options=gathering),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer, options=gathering),
    }
    if dist.get_rank() == 0:
        assert_bitwise(wholes(plain(full)), wanted)
    else:
        assert full == {"model": {}, "optimizer": {}}
    train_elsewhere(mesh_of(4), full, wanted, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


WHOLE = torch.arange(24.0).view(8, 3)


def module(mesh: Any, device: str = "cpu") -> nn.Module:
    """A module whose parameters are sharded in every way."""
    made = nn.Module()
    ways = {
        "rows": [Shard(0), Shard(1)],
        "order": P(("b", "a")),
        "interleaved": [Replicate(), InterleavedShard(0, 2)],
        "replicated": [Replicate(), Replicate()],
    }
    for name, placements in ways.items():
        made.register_parameter(name, nn.Parameter(distribute_tensor(WHOLE, mesh, placements).to(device)))
    made.register_parameter("scalar", nn.Parameter(distribute_tensor(torch.tensor(2.0), mesh, [Replicate()] * 2)))
    made.register_buffer("plain", torch.ones(2))
    return made


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_layout_is_distributed(device: str) -> None:
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        first = module(mesh)
        full = plain(get_model_state_dict(first, options=FULL))
        second = module(mesh, device)
        doubled = {name: 2 * value for name, value in full.items()}
        set_model_state_dict(second, dict(doubled), options=FULL)
        for name, value in second.state_dict().items():
            if name != "plain":
                assert value._spec is first.state_dict()[name]._spec, name
                value = value.full_tensor().shards[3]
            assert torch.equal(value, doubled[name]), name
        with torch.no_grad():
            second.get_parameter("replicated").zero_()
        assert doubled["replicated"].sum() == 2 * WHOLE.sum()  # the values were copied


def test_a_partial_tensor_is_reduced() -> None:
    with shardwise.simulate(2):
        made = nn.Module()
        made.register_buffer("sum", distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [Partial()]))
        assert torch.equal(get_model_state_dict(made, options=FULL)["sum"].shards[1], WHOLE)


def test_without_distributed_tensors_nothing_changes() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    set_optimizer_state_dict(model, optimizer, state, options=FULL)
    assert get_model_state_dict(model, options=FULL).keys() == {"weight", "bias"}


@on_processes
def test_every_option_of_the_helpers() -> None:
    state_dicts.library = shardwise
    state_dicts.run("tp")
