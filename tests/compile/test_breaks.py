"""Where something cannot be in one graph, a compiled function still computes what it computes without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.compile.cases import MLP, Make
from tests.compile.test_compile import WORLDS, check, results
from tests.worlds import lone_rank, mesh_of

# PyTorch's own, while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def between_ops(x: DTensor) -> Tensor:
    y = x @ x.t()
    torch._dynamo.graph_break()
    z = y.redistribute(placements=[Replicate()]).relu()
    torch._dynamo.graph_break()
    return z.sum(0)


def over_placements(x: DTensor) -> Tensor:
    own, made = x.placements, [Shard(0)]
    torch._dynamo.graph_break()
    return x.redistribute(placements=own) + x.redistribute(placements=made)


def reads_a_value(x: DTensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def reads_the_spec(x: DTensor) -> Tensor:
    return x * len(x.spec.shape) + (x * 2).spec.ndim


def in_modes(x: DTensor) -> Tensor:
    with shardwise.explicit():
        y = x * 2
    with shardwise.implicit_replication():
        return y + torch.ones(8, 4)


def masked(x: DTensor) -> Tensor:
    return x[x > 0] * 2


def pending(x: DTensor) -> Tensor:
    return x.redistribute(placements=[Replicate()], async_op=True) + 1


FUNCTIONS: list[Callable[[DTensor], Tensor]] = [
    between_ops,
    over_placements,
    reads_a_value,
    reads_the_spec,
    in_modes,
    masked,
    pending,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_break(function: Callable[[DTensor], Tensor]) -> None:
    with mesh_of(2, names=("tp",)) as mesh:
        check(function, [Make(mesh)(8, 4, on=Replicate() if function is masked else Shard(0))], backend="aot_eager")


@pytest.mark.parametrize("world", WORLDS)
def test_batches_of_other_sizes(world: str) -> None:
    with WORLDS[world]() as mesh:
        make = Make(mesh)
        weight = make(4, 8, on=Shard(1))
        function: Any = lambda x, w: (x @ w).relu().sum(1)  # noqa: E731
        styled = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        of_product = torch.compile(function, backend="aot_eager")
        of_styled = torch.compile(styled, backend="aot_eager")
        for size in (8, 12, 16):
            x = make(size, 4)
            torch.testing.assert_close(results(of_product, [x, weight])[1], results(function, [x, weight])[1])
            plain = torch.randn(size, 8, requires_grad=True)
            torch.testing.assert_close(results(of_styled, [plain])[1], results(styled, [plain])[1])


def test_sizes_of_plain_tensors_as_arguments() -> None:
    with lone_rank() as mesh:
        make = Make(mesh)
        function: Any = lambda x, y: x.view(y.shape[0], 2, -1).sum(0) * y.shape[0]  # noqa: E731
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for size in (4, 8, 12):
            x, y = make(size, 4, on=Replicate()), torch.ones(size)
            torch.testing.assert_close(results(compiled, [x, y])[1], results(function, [x, y])[1])


def test_a_step_with_an_optimizer() -> None:
    with mesh_of(2, names=("tp",)) as mesh:
        make, start = Make(mesh), torch.randn(8, 4)
        x = make(8, 4).detach()

        def trained(compiled: bool) -> Tensor:
            weight = nn.Parameter(make.of(start, Shard(0)))
            optimizer = torch.optim.AdamW([weight], lr=0.1)

            def step() -> None:
                optimizer.zero_grad()
                ((weight * x) ** 2).sum().backward()
                optimizer.step()

            run = torch.compile(step, backend="aot_eager") if compiled else step
            run()
            run()
            return weight.detach().full_tensor()  # type: ignore[attr-defined]

        torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-5)
