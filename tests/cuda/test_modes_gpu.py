"""Modes in backward passes that run in autograd's own threads: those of a device."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import Replicate, Shard, distribute_tensor
from shardwise.dispatch.modes import modes
from shardwise.errors import MixedTensorError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with shardwise.simulate(2):
        yield init_device_mesh("cuda", (2,), mesh_dim_names=("a",))


def test_a_device_thread_has_the_modes_of_the_thread_that_starts_the_pass(mesh: DeviceMesh) -> None:
    seen: list[tuple[bool, bool]] = []

    def hook(gradient: Any) -> None:
        seen.append((modes.explicit, threading.current_thread() is threading.main_thread()))

    x = distribute_tensor(torch.ones(4, 2, device="cuda"), mesh, [Shard(0)]).requires_grad_()
    y = x * 2
    y.register_hook(hook)
    with shardwise.explicit():
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert [explicit for explicit, _ in seen] == [True, False]
    assert not any(in_main_thread for _, in_main_thread in seen)


def test_accumulate_gradients_reaches_device_threads(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4, 2, device="cuda"), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(2, 2, device="cuda"), mesh, [Replicate()]).requires_grad_()
    with shardwise.accumulate_gradients():
        (x @ w).sum().backward()
    assert w.grad is not None
    assert w.grad.placements == (shardwise.Partial(),)
    (x @ w).sum().backward()
    assert w.grad.placements == (Replicate(),)


def test_a_users_hook_in_a_device_thread_is_refused(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4, 2, device="cuda"), mesh, [Shard(0)]).requires_grad_()
    y = x.cumprod(0)
    y.register_hook(lambda gradient: gradient * torch.ones(4, 2, device="cuda"))
    with pytest.raises(MixedTensorError):
        y.sum().backward()


def test_formulas_and_saved_tensors_in_a_device_thread(mesh: DeviceMesh) -> None:
    data, plain = torch.rand(4, 2, device="cuda") + 0.5, torch.rand(4, 2, device="cuda")
    x = distribute_tensor(data, mesh, [Shard(0)]).requires_grad_()
    with shardwise.implicit_replication():
        y = x**plain
    y.cumprod(0).sum().backward()
    one = data.clone().requires_grad_()
    (one**plain).cumprod(0).sum().backward()
    assert x.grad is not None
    assert one.grad is not None
    torch.testing.assert_close(shardwise.world.common(x.grad.full_tensor()), one.grad)
