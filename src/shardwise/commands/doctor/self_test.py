"""Run a few calls on a mesh, and compare the results with one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...sharding.mesh import DeviceMesh
from ...sharding.placement import Partial, Placement, Replicate, Shard
from ...tensor.creation import distribute_tensor, randn


class Check(NamedTuple):
    """One check and its outcome; `problem` is "" if it passed."""

    name: str
    problem: str


def self_test(mesh: DeviceMesh) -> list[Check]:
    """Run all checks on the mesh. Every rank returns the same list, with the problems of all ranks."""
    return [Check(name, _tried(mesh, check)) for name, check in _checks(mesh)]


def _tried(mesh: DeviceMesh, check: Callable[[], str]) -> str:
    try:
        problem = check()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


def _checks(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str]]]:
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        yield f"all-reduce over {name}", lambda axis=axis: _all_reduce(mesh, axis)  # type: ignore[misc]
    yield "redistribution between all placements", lambda: _redistribute(mesh)
    yield "uneven shards", lambda: _uneven(mesh)
    yield "a product and its gradients", lambda: _product(mesh)
    yield "the same random numbers on every rank", lambda: _random(mesh)


def _all_reduce(mesh: DeviceMesh, axis: int) -> str:
    group = mesh.get_group(axis)
    value = torch.full((4,), float(dist.get_rank()), device=mesh.device_type)
    dist.all_reduce(value, group=group)
    wanted = float(sum(dist.get_process_group_ranks(group)))
    return "" if bool((value == wanted).all()) else f"the sum of ranks is {value[0].item()}, not {wanted}"


def _redistribute(mesh: DeviceMesh) -> str:
    """Redistribute a tensor from each list of placements to each other one."""
    values = torch.arange(64 * 64, dtype=torch.float32, device=mesh.device_type).reshape(64, 64)
    kinds: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
    rows = [[kind] * mesh.ndim for kind in kinds]
    rows += [[a, *[b] * (mesh.ndim - 1)] for a, b in itertools.permutations(kinds, 2)] if mesh.ndim > 1 else []
    for source, target in itertools.permutations(rows, 2):
        x = distribute_tensor(values, mesh, source, src_data_rank=None)
        found = x.redistribute(placements=target).full_tensor()
        if not torch.equal(found, values):
            return f"{source} -> {target} changes values"
    return ""


def _uneven(mesh: DeviceMesh) -> str:
    values = torch.arange(7 * 5, dtype=torch.float32, device=mesh.device_type).reshape(7, 5)
    x = distribute_tensor(values, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
    found = x.redistribute(placements=[Shard(1)] * mesh.ndim).full_tensor()
    return "" if torch.equal(found, values) else "redistribution of uneven shards changes values"


def _product(mesh: DeviceMesh) -> str:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).pow(2).mean()

    x = torch.arange(32 * 16, dtype=torch.float64, device=mesh.device_type).reshape(32, 16) / 512
    w = torch.arange(16 * 8, dtype=torch.float64, device=mesh.device_type).reshape(16, 8) / 128
    plain = w.clone().requires_grad_()
    loss(x, plain).backward()
    for placement in (Shard(0), Shard(1), Replicate()):
        sharded = distribute_tensor(w, mesh, [placement] * mesh.ndim, src_data_rank=None).requires_grad_()
        loss(distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None), sharded).backward()
        assert sharded.grad is not None
        if not torch.allclose(sharded.grad.full_tensor(), plain.grad):  # type: ignore[attr-defined, arg-type]
            return f"the gradient of a weight with {placement} differs"
    return ""


def _random(mesh: DeviceMesh) -> str:
    drawn = randn(16, 16, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim).full_tensor()
    again = [torch.empty_like(drawn) for _ in range(dist.get_world_size())]
    dist.all_gather(again, drawn)
    return "" if all(torch.equal(drawn, other) for other in again) else "ranks drew different numbers"
