"""`transfer` between real processes. Rank 1 is in neither mesh of the first test, and does not call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Replicate, distribute_tensor, transfer
from shardwise.transferring import Part
from tests.comm.mesh_pairs import coordinates
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, cut
from tests.transferring.models import fully_sharded, tensor_parallel, weights


def check(found: dict[str, Any], expected: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    assert {name for name, value in found.items() if isinstance(value, DTensor)} == expected.keys()
    at = coordinates(mesh).get(dist.get_rank())
    for name, value in expected.items():
        local = found[name].to_local().detach()
        if at is None:
            assert local.numel() == 0
        else:
            assert_same(local, cut(value, mesh, tensor_parallel(name, value.shape), at), name)


@on_processes
def test_ranks_in_neither_mesh_do_not_call() -> None:
    trainer = DeviceMesh("cpu", [0, 2], mesh_dim_names=("fsdp",))
    generator = DeviceMesh("cpu", [[2, 3]], mesh_dim_names=("dp", "tp"))
    plain = weights()
    if dist.get_rank() == 1:
        return
    for bucket in (1 << 20, 2048):
        state = fully_sharded(plain, trainer)
        found = transfer(state, generator, tensor_parallel, dtype=torch.bfloat16, bucket_bytes=bucket)
        check(found, {name: value.bfloat16() for name, value in plain.items()}, generator)
    zeros = {name: torch.zeros_like(value) for name, value in plain.items()}
    there = {
        name: distribute_tensor(value, generator, tensor_parallel(name, value.shape), src_data_rank=None)
        for name, value in zeros.items()
    }
    check(transfer(state, into=there), plain, generator)
    check(there, plain, generator)


@on_processes
def test_ranks_without_the_state_dict_are_told_of_it() -> None:
    trainer = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
    generator = DeviceMesh("cpu", [[2, 3]], mesh_dim_names=("dp", "tp"))
    plain = weights()
    state = fully_sharded(plain, trainer) | {"plain": torch.arange(6.0), "step": 7} if dist.get_rank() < 2 else None

    def convert(name: str) -> Any:
        for index, part in enumerate("qkv"):
            if f".{part}." in name:
                return Part(name.replace(f".{part}.", ".qkv."), index, groups=2)
        return name

    found = transfer(state, generator, tensor_parallel, convert=convert, source=trainer)
    assert found["step"] == 7
    expected = {name: value for name, value in plain.items() if convert(name) == name} | {"plain": torch.arange(6.0)}
    for layer in range(2):
        parts = [plain[f"layers.{layer}.{part}.weight"].chunk(2) for part in "qkv"]
        expected[f"layers.{layer}.qkv.weight"] = torch.cat([part[i] for i in range(2) for part in parts])
    check(found, expected, generator)


@on_processes
def test_all_ranks_in_both_meshes() -> None:
    trainer = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("fsdp",))
    generator = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    plain = weights()
    check(transfer(fully_sharded(plain, trainer), generator, tensor_parallel), plain, generator)
    replicated = {name: distribute_tensor(value, trainer, [Replicate()]) for name, value in plain.items()}
    check(transfer(replicated, generator, tensor_parallel), plain, generator)
