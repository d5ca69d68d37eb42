"""One graph serves many batch sizes: sizes are symbols, and a graph is guarded by what its plans took for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.compile.cases import MLP, Make
from tests.worlds import lone_rank

# PyTorch's own, while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

SIZES = (8, 16, 24, 32)
OTHER_SIZES = (8, 16, 24, 12, 7)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def results(function: Any, batch: Tensor) -> tuple[Tensor, list[Any]]:
    """What a function returns; its local value, and the local gradients of its argument and parameters.

    Local ones, since uneven shards cannot be gathered here: the process group moves nothing.
    """
    leaves = [batch, *(function.parameters() if isinstance(function, nn.Module) else ())]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(7)
    result = function(batch)
    (result * result).sum().backward()
    found = [result.detach(), *(leaf.grad for leaf in leaves)]
    return result, [value.to_local() if isinstance(value, DTensor) else value for value in found]


def graphs(function: Any, make: Callable[[int], Tensor], sizes: tuple[int, ...], **options: Any) -> int:
    """How many graphs are compiled for batches of these sizes, whose results are compared with those of eager code."""
    counter = CompileCounterWithBackend(options.pop("backend", "aot_eager"))
    compiled = torch.compile(function, backend=counter, fullgraph=True, **options)
    for size in sizes:
        batch = make(size)
        expected, eager = results(function, batch)
        found, made = results(compiled, batch)
        torch.testing.assert_close(made, eager, rtol=1e-5, atol=1e-5)
        assert type(found) is type(expected)
        if isinstance(found, DTensor) and isinstance(expected, DTensor):
            assert found.spec is expected.spec
    return int(counter.frame_count)


class Block(nn.Module):
    """A transformer block over batches of sequences of 8 positions with 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        batch, length, _ = q.shape
        q, k, v = (y.view(batch, length, -1, 4).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def block(mesh: DeviceMesh, local: bool) -> nn.Module:
    column, row = ColwiseParallel(use_local_output=local), RowwiseParallel(use_local_output=True)
    plan = {"q": column, "k": column, "v": column, "out": row, "up": column, "down": row}
    return parallelize_module(Block(), mesh, plan)  # type: ignore[arg-type]


def sequence_parallel_block(mesh: DeviceMesh) -> nn.Module:
    column = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    norm = SequenceParallel()
    plan = {"norm1": norm, "norm2": norm, "q": column, "k": column, "v": column, "out": row, "up": column, "down": row}
    return parallelize_module(Block(), mesh, plan)  # type: ignore[arg-type]


def mlp(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def plain(*sizes: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *sizes, requires_grad=True)


# ---- modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_styled_module_with_plain_inputs(dynamic: bool | None) -> None:
    with lone_rank() as mesh:
        assert graphs(mlp(mesh), plain(8), SIZES, dynamic=dynamic) <= 2
        assert graphs(mlp(mesh), plain(8), OTHER_SIZES, dynamic=dynamic) <= 2


@pytest.mark.parametrize("local", [True, False])
def test_a_transformer_block_with_plain_inputs(local: bool) -> None:
    with lone_rank() as mesh:
        assert graphs(block(mesh, local), plain(8, 16), SIZES) == 2


def test_a_sequence_parallel_block_with_distributed_inputs() -> None:
    with lone_rank() as mesh:
        make = Make(mesh)
        assert graphs(sequence_parallel_block(mesh), lambda size: make(size, 8, 16, on=Shard(1)), SIZES) == 2


def test_mark_dynamic() -> None:
    with lone_rank() as mesh:
        make = Make(mesh)

        def marked(batch: Tensor) -> Tensor:
            torch._dynamo.mark_dynamic(batch, 0)
            return batch

        assert graphs(mlp(mesh), lambda size: marked(plain(8)(size)), (16, 24, 32)) == 1
        weight = make(8, 16, on=Replicate())
        function = lambda x: (x @ weight).relu()  # noqa: E731
        assert graphs(function, lambda size: marked(make(size, 8)), (16, 24, 32)) == 1


def test_the_graph_of_dynamo() -> None:
    with lone_rank() as mesh:
        assert graphs(mlp(mesh), plain(8), SIZES, backend="eager") == 2


# ---- functions of a batch -------------------------------------------------------------------------------------------


def reduces(x: DTensor) -> Tensor:
    return x.mean() + (x * x).sum(0).mean() + F.mse_loss(x, x.detach() * 2) + x.softmax(1).amax(1).sum()


def moves(x: DTensor) -> Tensor:
    along = x.redistribute(placements=[Shard(1)]) * 2
    return along.redistribute(placements=[Replicate()]) + x.redistribute(placements=[Replicate()])


def reshapes(x: DTensor) -> Tensor:
    size = x.shape[0]
    joined = torch.cat([x, x], 1).view(size, 2, -1).transpose(1, 2).reshape(size, -1)
    first, second = joined.chunk(2, 1)
    return first * 2 + second.unsqueeze(0).expand(3, size, -1).sum(0)


def drops(x: DTensor) -> Tensor:
    return F.dropout(x, 0.5)


def makes(x: DTensor) -> Tensor:
    more = shardwise.ones(x.shape[0], 8, device_mesh=x.device_mesh, placements=x.placements)
    return x * more + torch.zeros_like(x) + x.new_ones(x.shape) + x.shape[0]


def loses(x: DTensor) -> Tensor:
    return F.cross_entropy(x, x.argmax(1)) * x.size(0)


def to_local_and_back(x: DTensor) -> Tensor:
    return DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements)


FUNCTIONS = [reduces, moves, reshapes, drops, makes, loses, to_local_and_back]


@pytest.mark.parametrize("on", [Replicate(), Shard(0)], ids=["replicated", "sharded"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_of_a_batch(function: Any, on: Any) -> None:
    with lone_rank() as mesh:
        make = Make(mesh)
        assert graphs(function, lambda size: make(size, 8, on=on), (12, 16, 24, 32)) <= 2


def test_uneven_batches() -> None:
    with lone_rank() as mesh:
        make = Make(mesh)
        assert graphs(reshapes, lambda size: make(size, 8, on=Shard(0)), (*OTHER_SIZES, 9)) <= 4
