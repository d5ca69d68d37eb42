"""Libraries that write tensors to files or wrap models: they get full tensors, or a clear error, never one shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardwise
from shardwise import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from shardwise.errors import InputError
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, mesh_of

safetensors = pytest.importorskip("safetensors.torch")
FULL = StateDictOptions(full_state_dict=True)
NO_STORAGE = "is a DTensor and has no storage that holds its values"


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(6, 8)


def sharded(model: Any, mesh: Any, placements: Any) -> Any:
    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(placed))

    return distribute_module(model, mesh, shard)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_safetensors_refuses_distributed_tensors(tmp_path: Path, placement: Any) -> None:
    with shardwise.simulate(2):
        model = sharded(linear(), init_device_mesh("cpu", (2,)), [placement])
        for save in (
            lambda path: safetensors.save_file(model.state_dict(), path),
            lambda path: safetensors.save_model(model, path),
            lambda path: path.write_bytes(safetensors.save(model.state_dict())),
        ):
            with pytest.raises(InputError, match=NO_STORAGE):
                save(tmp_path / "model.safetensors")
        assert not list(tmp_path.iterdir())


@on_processes
def test_safetensors_on_processes(tmp_path: Path) -> None:
    model = sharded(linear(), mesh_of(4), [Shard(0)])
    with pytest.raises(InputError, match=NO_STORAGE):
        safetensors.save_model(model, tmp_path / "model.safetensors")
    full = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        safetensors.save_file(full, tmp_path / "model.safetensors")
    dist.barrier()
    for name, value in safetensors.load_file(tmp_path / "model.safetensors").items():
        assert_same(value, linear().state_dict()[name], name)


@on_processes
def test_data_parallel_wrappers_are_refused() -> None:
    advice = r"'weight' is the DTensor f32\[.* call shardwise.install\(\) before other imports"
    for placement in (Shard(0), Replicate()):
        with pytest.raises(InputError, match=advice):
            nn.parallel.DistributedDataParallel(sharded(linear(), mesh_of(4), [placement]))
    mixed = nn.Sequential(nn.LayerNorm(8), sharded(linear(), mesh_of(4), [Shard(0)]))
    with pytest.raises(InputError, match=r"'1.weight' is the DTensor"):
        nn.parallel.DistributedDataParallel(mixed, device_mesh=mesh_of(4))
    skipped = ["1.weight", "1.bias"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(mixed, skipped)
    nn.parallel.DistributedDataParallel(mixed)
    nn.parallel.DistributedDataParallel(nn.LayerNorm(8))


@on_processes
def test_accelerate_does_not_wrap_distributed_models() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.LayerNorm(8), sharded(linear(), mesh_of(4), [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:  # as torchrun does
        ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}
        for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
            patch.setenv(name, str(value))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.raises(InputError, match=r"shardwise.install\(\)"):
            accelerate.Accelerator(cpu=True).prepare(model, optimizer)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@on_processes
def test_transformers_and_accelerate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=32
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    model = sharded(plain, mesh_of(4), [Shard(0)])
    with pytest.raises(InputError, match=NO_STORAGE):
        model.save_pretrained(tmp_path / "shards")
    with pytest.raises(InputError, match=NO_STORAGE):
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "shards")
    full = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "full", state_dict=full)
    dist.barrier()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "full")
    for name, value in loaded.state_dict().items():
        assert_same(value, wanted[name], name)
