"""Compiled functions of distributed tensors compute what they compute without a compiler, forward and backward."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Partial, RankTensor, Replicate, Shard
from tests.compile.cases import CASES, Make
from tests.worlds import lone_rank, mesh_of

WORLDS: dict[str, Callable[[], contextlib.AbstractContextManager[DeviceMesh]]] = {
    "simulated": lambda: mesh_of(2, names=("tp",)),
    "processes": lone_rank,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def values(tensor: Tensor | None) -> Any:
    local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return [shard.detach() for shard in local.shards] if isinstance(local, RankTensor) else local


def results(function: Callable[..., Tensor], arguments: list[Tensor]) -> tuple[Tensor, list[Any]]:
    """What a function returns; its value, and the gradients of its arguments and parameters."""
    leaves = [*arguments, *(function.parameters() if isinstance(function, nn.Module) else ())]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(7)
    result = function(*arguments)
    if result.requires_grad:
        (result * result).sum().backward()
    return result, [values(result), *(values(leaf.grad) for leaf in leaves)]


def check(function: Any, arguments: list[Tensor], **options: Any) -> None:
    expected, eager = results(function, arguments)
    found, compiled = results(torch.compile(function, **options), arguments)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    assert type(found) is type(expected)
    if isinstance(found, DTensor) and isinstance(expected, DTensor):
        assert found.spec is expected.spec


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_one_graph(name: str, world: str) -> None:
    if (name, world) == ("views", "processes"):
        pytest.skip("the fake process group does not exchange uneven parts")
    with WORLDS[world]() as mesh:
        check(*CASES[name](Make(mesh)), backend="aot_eager", fullgraph=True)


def test_uneven_gathers_and_sums() -> None:
    def function(rows: Tensor, columns: Tensor) -> Tensor:
        product = rows.redistribute(placements=[Replicate()]) * columns.redistribute(placements=[Replicate()])
        return product.redistribute(placements=[Partial()]).redistribute(placements=[Shard(0)])

    with lone_rank() as mesh:  # simulated shards of different sizes run without a graph
        make = Make(mesh)
        check(function, [make(21, 19, on=Shard(0)), make(21, 19, on=Shard(1))], backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("name", ["redistribute", "sequence_parallel", "local_function", "scalar_loss"])
def test_the_graph_of_dynamo(name: str) -> None:
    with lone_rank() as mesh:
        check(*CASES[name](Make(mesh)), backend="eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
def test_inductor() -> None:
    with lone_rank() as mesh:
        check(*CASES["sequence_parallel"](Make(mesh)), backend="inductor", fullgraph=True)


def test_shards_of_different_sizes_break_the_graph_of_a_simulated_world() -> None:
    with mesh_of(2, names=("tp",)) as mesh:
        check(lambda x: x.sum(0) + x.mean(), [Make(mesh)(7, 4)], backend="aot_eager")
    with lone_rank() as mesh:  # whose reductions reduce nothing: no result here is Partial
        check(lambda x: (x * 2).sin(), [Make(mesh)(7, 4)], backend="aot_eager", fullgraph=True)


def test_a_graph_is_for_its_placements() -> None:
    with lone_rank() as mesh:
        make = Make(mesh)
        function = torch.compile(lambda x: x.sum(1), backend="aot_eager", fullgraph=True)
        for dim in (0, 1, 0):
            x = make(8, 8, on=Shard(dim))
            assert function(x).spec is x.sum(1).spec  # type: ignore[attr-defined]
