"""The stream is the user's generator: seeds, states, forks, `generator=` and checkpointing act as on plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, rand
from shardwise.errors import WorldError
from shardwise.random import agreement, draw
from tests.ops.helpers import on, r, ranks, whole
from tests.processes.pool import on_processes

x = r(6, 10)


@pytest.fixture(params=["global tensor", "by index"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by index":
        monkeypatch.setattr(draw, "GLOBAL_DRAW_LIMIT", 0)


def test_states_and_forks() -> None:
    with ranks(2) as mesh:
        given = on(mesh, x, Shard(0))
        torch.manual_seed(3)
        state = torch.get_rng_state()
        first, second = whole(torch.rand_like(given)), whole(torch.rand_like(given))
        torch.set_rng_state(state)
        assert torch.equal(whole(torch.rand_like(given)), first)
        with torch.random.fork_rng():
            assert torch.equal(whole(torch.rand_like(given)), second)
        assert torch.equal(whole(torch.rand_like(given)), second)
    assert not torch.equal(first, second)


def test_a_generator_is_honoured() -> None:
    with ranks(2) as mesh:
        given = on(mesh, x, Shard(0))
        state = torch.get_rng_state()
        drawn = [whole(given.clone().uniform_(generator=torch.Generator().manual_seed(s))) for s in (3, 3, 4)]
        generator = torch.Generator().manual_seed(3)
        again = [whole(given.clone().uniform_(generator=generator)) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], again[0])
    assert not torch.equal(again[0], again[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_plain_numbers_after_a_draw_do_not_depend_on_placements() -> None:
    after = []
    for sizes, placements in (((4,), [Shard(0)]), ((4,), [Replicate()]), ((2, 3), [Shard(1), Partial()])):
        with ranks(*sizes) as mesh:
            given = on(mesh, x, *placements)
            torch.manual_seed(0)
            F.dropout(given, 0.3), torch.randn_like(given), given.clone().geometric_(0.2)
            after.append(torch.rand(5))
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_again(reentrant: bool) -> None:
    def forward(t: Tensor) -> Tensor:
        return F.dropout(F.dropout(t * t, 0.5).relu(), 0.3) * t

    with ranks(2, 2) as mesh:
        gradients = []
        for run in (forward, lambda t: checkpoint(forward, t, use_reentrant=reentrant)):
            given = on(mesh, x, Shard(0), Shard(1), grad=True)
            torch.manual_seed(0)
            run(given).sum().backward()
            assert given.grad is not None
            gradients.append(whole(given.grad))
    assert torch.equal(*gradients)


def test_calls_that_draw_nothing_leave_the_generator_alone() -> None:
    with ranks(2) as mesh:
        given = on(mesh, x, Shard(0))
        state = torch.get_rng_state()
        F.dropout(given, 0.5, training=False), torch.native_dropout(given, 0.0, True), F.rrelu(given)
        assert torch.equal(torch.get_rng_state(), state)


# ---- meta-device initialisation -------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of any plain tensor that an op gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and not result.is_meta:
            self.elements = max(self.elements, result.numel())
        return result


def build(mesh: Any, placements: list[Any]) -> nn.Module:
    """A model made on the meta device, sharded, and initialised by its own methods."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 48), nn.Conv1d(4, 6, 3), nn.Embedding(40, 32))
    for module in model:
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model:
        module.reset_parameters()
    return model


def test_meta_initialisation() -> None:
    found = []
    for sizes, placements in (((1,), [Replicate()]), ((4,), [Shard(0)]), ((2, 3), [Shard(0), Shard(0)])):
        with ranks(*sizes) as mesh:
            parameters = [p for p in build(mesh, placements).parameters() if isinstance(p, DTensor)]
            assert all(list(p.placements) == placements for p in parameters)
            found.append([whole(p) for p in parameters])
    assert len(found[0]) == 5
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    if draw.GLOBAL_DRAW_LIMIT:  # those of plain torch, which the same program gives on one device
        model = nn.Sequential(nn.Linear(64, 48), nn.Conv1d(4, 6, 3), nn.Embedding(40, 32))
        torch.manual_seed(0)
        for module in model:
            module.reset_parameters()  # type: ignore[operator]
        assert all(torch.equal(a, b) for a, b in zip(found[0], model.parameters(), strict=True))


@on_processes
def test_no_rank_ever_holds_a_global_tensor() -> None:
    with pytest.MonkeyPatch.context() as patch, Largest() as largest:
        patch.setattr(draw, "GLOBAL_DRAW_LIMIT", 0)
        build(init_device_mesh("cpu", (4,)), [Shard(0)])
    assert largest.elements <= 64 * 48 // 4


# ---- generators in different states ---------------------------------------------------------------------------------


@on_processes
def test_ranks_that_never_seed_take_the_state_of_the_first_rank() -> None:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("unseeded", "mesh"))
    given = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    agreement._Check.warned = False
    agreement._CHECKED.of(given._spec.mesh_info.runtime).clear()  # processes serve several tests
    torch.manual_seed(rank)
    with pytest.warns(UserWarning, match=r"cpu generator is in another state on .* all take the state of rank 0"):
        found = torch.rand_like(given).full_tensor()
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(x.shape))
    torch.manual_seed(rank)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("unseeded",))
    drawn = rand(5, device_mesh=line, placements=[Replicate()]).to_local()  # no second warning
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(5))


@on_processes
def test_ranks_whose_generators_differ_are_named() -> None:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    given = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    shardwise.random.manual_seed(1 if rank == 2 else 0, mesh)
    for _ in range(2):  # until they are seeded alike
        with pytest.raises(WorldError, match=r"default cpu generator is in another state on rank\(s\) 2 than"):
            torch.rand_like(given)
    shardwise.random.manual_seed(0, mesh)
    first = torch.rand_like(given).full_tensor()
    shardwise.random.manual_seed(0, mesh)
    assert torch.equal(torch.rand_like(given).full_tensor(), first)
    with pytest.raises(WorldError, match=r"generator that was passed is in another state on rank\(s\) 1, 3 than"):
        given.clone().uniform_(generator=torch.Generator().manual_seed(rank % 2 and 5))
    shardwise.random.set_generator_check(False)
    try:
        shardwise.random.manual_seed(rank, mesh)
        torch.rand_like(given)
    finally:
        shardwise.random.set_generator_check(True)
        torch.manual_seed(0)
