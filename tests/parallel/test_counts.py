"""How often a parallelized model communicates: never twice for the same data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from shardwise.debug import CommDebugMode
from shardwise.errors import ShapeError
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tests.parallel.models import Attention, Half, Mlp, counts, follows_one_device, line_of
from tests.processes.pool import on_processes

S1 = Shard(1)
ONE_OF_EACH = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


def sequence_plan(inner: str, local: bool) -> dict[str, object]:
    """The half-block under sequence parallel; q, k and v gather their input themselves, or get it gathered."""
    use = {"use_local_output": local}
    norm = {"norm": SequenceParallel()}
    if inner == "mlp":
        up = ColwiseParallel(input_layouts=S1, **use)
        return norm | {"inner.up": up, "inner.down": RowwiseParallel(output_layouts=S1, **use)}
    out = {"inner.o": RowwiseParallel(output_layouts=S1, **use)}
    if inner == "gathers for each":
        return norm | {"inner.[qkv]": ColwiseParallel(input_layouts=S1, **use)} | out
    prepare = PrepareModuleInput(input_layouts=S1, desired_input_layouts=Replicate())
    return norm | {"inner": prepare, "inner.[qkv]": ColwiseParallel(**use)} | out


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("inner", ["mlp", "gathers for each", "gathers once"])
def test_half_a_block_under_sequence_parallel(inner, local) -> None:
    def parallelize(model, mesh):
        parallelize_module(model, mesh, sequence_plan(inner, local))

    def half(affine):
        return lambda: Half(Mlp() if inner == "mlp" else Attention(), affine)

    with line_of(4) as mesh:
        x = torch.randn(2, 8, 16)
        at = {"sharded": 1, "output_sharded": 1, "distributed": not local}
        forward, backward = follows_one_device(half(affine=False), parallelize, mesh, x, **at)
        assert forward == backward == ONE_OF_EACH
        # On each rank a norm sees a shard of the sequence: the gradients of its parameters are summed, together.
        forward, backward = follows_one_device(half(affine=True), parallelize, mesh, x, **at)
        assert forward == ONE_OF_EACH
        assert backward == ONE_OF_EACH | {"all_reduce": 1}


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("inner", ["inner.[qkv]", "inner.up"])
def test_half_a_block_under_tensor_parallel(inner, local) -> None:
    use = {"use_local_output": local}
    plan = {inner: ColwiseParallel(**use), "inner.[od]*": RowwiseParallel(**use)}

    def parallelize(model, mesh):
        parallelize_module(model, mesh, plan)
        distribute_module(model.norm if local else model, mesh)
        if local:
            parallelize_module(model.norm, mesh, "replicate")

    with line_of(4) as mesh:
        make = lambda: Half(Mlp() if inner == "inner.up" else Attention())  # noqa: E731
        forward, backward = follows_one_device(make, parallelize, mesh, torch.randn(2, 8, 16), distributed=not local)
        assert forward == backward == {"all_reduce": 1}


def test_blocks_in_a_row() -> None:
    with line_of(4) as mesh:
        plan = {f"*.{name}": style for name, style in sequence_plan("gathers for each", local=False).items()}
        forward, backward = follows_one_device(
            lambda: nn.Sequential(*(Half(Attention(), affine=False) for _ in range(3))),
            lambda m, mesh: parallelize_module(m, mesh, plan),
            mesh,
            torch.randn(2, 8, 16),
            sharded=1,
            distributed=True,
        )
        assert forward == backward == {name: 3 * n for name, n in ONE_OF_EACH.items()}


def test_a_data_parallel_step_reduces_all_gradients_together() -> None:
    with line_of(4) as mesh:
        model = distribute_module(nn.Sequential(Half(Mlp()), nn.Linear(16, 3)), mesh)
        x = distribute_tensor(torch.randn(7, 5, 16), mesh, [Shard(0)])
        target = distribute_tensor(torch.randint(0, 3, (7, 5)), mesh, [Shard(0)])
        with CommDebugMode() as comm:
            loss = F.cross_entropy(model(x).flatten(0, 1), target.flatten())
        assert counts(comm) == {"all_reduce": 1}  # the mean, over all rows
        with CommDebugMode() as comm:
            loss.backward()
        assert counts(comm) == {"all_reduce": 1}
        optimizer = torch.optim.AdamW(model.parameters())
        with CommDebugMode() as comm:
            optimizer.step()
        assert counts(comm) == {}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.halves = nn.ModuleList(Half(Mlp()) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for half in self.halves:
            x = half(x)
        return x


@on_processes
def test_nothing_is_communicated_to_find_the_length_of_a_local_sequence() -> None:
    # Between modules the program works on local shards, which are taken to be even.
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = Tokens()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=S1),
            **{f"halves.*.{name}": style for name, style in sequence_plan("mlp", local=True).items()},
        },
    )
    for length in (8, 8, 16, 4):
        with CommDebugMode() as comm:
            model(torch.randint(0, 12, (2, length)))
        assert counts(comm) == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 3}


class HostReads(TorchDispatchMode):
    """Counts the values that leave tensors: each makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@on_processes
def test_a_training_step_reads_nothing_on_the_host() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for local in (True, False):
        model = nn.Sequential(Half(Attention()), Half(Mlp()))
        for half, inner in zip(model, ("gathers for each", "mlp"), strict=True):
            parallelize_module(half, mesh, sequence_plan(inner, local))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        x = torch.randn(2, 2, 16)  # the local shard of a sequence of 8
        with HostReads() as reads:
            given = x if local else DTensor.from_local(x, mesh, [S1])
            model(given).square().mean().backward()
            optimizer.step()
        assert reads.count == 0
    with HostReads() as reads:
        torch.ones(3).sum().item()
    assert reads.count == 1


@pytest.mark.parametrize("length", [8, 7])
def test_uneven_local_sequences_are_an_error_that_says_what_to_write(length) -> None:
    with line_of(4) as mesh:
        local = distribute_tensor(torch.ones(3, length, 4), mesh, [S1]).to_local()
        norm = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel())
        if length == 8:
            assert norm(local).shape == (3, 8, 4)
            return
        with pytest.raises(ShapeError, match=r"pass the module a DTensor.*use_local_output=False"):
            norm(local)
