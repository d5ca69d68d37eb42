"""A distributed module is exported, saved, loaded and run; `make_fx` records ops on distributed tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise
from shardwise import (
    DeviceMesh,
    DTensor,
    InterleavedShard,
    P,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from shardwise.errors import InputError
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from shardwise.parallel.styles import ReplicatedOnShards, ReplicateParallel
from shardwise.sharding.placement import OrderedShard, Placements
from shardwise.tensor.exported import placements_from, text_of
from tests.compile.cases import CASES, MLP, Block, Make
from tests.processes.pool import on_processes
from tests.worlds import fake_group, lone_rank

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


MODULES = [
    "sharded_module",
    "styles_with_local_outputs",
    "styles_with_distributed_outputs",
    "sequence_parallel",
    "redistribute",
    "from_local",
    "full_tensor",
    "distribute",
]


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def module_and_input(name: str, mesh: DeviceMesh) -> tuple[nn.Module, Tensor]:
    function, (x,) = CASES[name](Make(mesh))
    return function if isinstance(function, nn.Module) else Calls(function), x.detach()


def saved_and_loaded(exported: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert type(result) is type(expected)
    if isinstance(result, DTensor) and isinstance(expected, DTensor):
        assert result.spec is expected.spec
        result, expected = result.to_local(), expected.to_local()
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_export(name: str, strict: bool) -> None:
    with lone_rank() as mesh:
        module, x = module_and_input(name, mesh)
        exported = torch.export.export(module, (x,), strict=strict)
        for program in (exported, saved_and_loaded(exported)):
            assert_same(program.module()(x * 2), module(x * 2))
    torch.compiler.reset()


def test_a_styled_module_with_distributed_inputs() -> None:
    with lone_rank() as mesh:
        module, x = module_and_input("styles_with_distributed_outputs", mesh)
        given = distribute_tensor(x, mesh, [Shard(0)])
        program = saved_and_loaded(torch.export.export(module, (given,)))
        assert_same(program.module()(given * 2), module(given * 2))


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


STYLED: dict[str, tuple[Callable[[], nn.Sequential], dict[str, ParallelStyle]]] = {
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8)),
        {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())},
    ),
    "local_parameters": (
        lambda: nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.LayerNorm(4), nn.Linear(16, 8)),
        {"0": ReplicateParallel(), "1": ColwiseParallel(), "2": ReplicatedOnShards(), "3": RowwiseParallel()},
    ),
    "attention": (
        lambda: nn.Sequential(nn.Embedding(16, 8), Attention(8, 4, batch_first=True)),
        {"0": ReplicateParallel(), "1": ColwiseParallel()},
    ),
}


@pytest.mark.parametrize("name", STYLED)
def test_other_styles(name: str) -> None:
    with lone_rank() as mesh:
        build, plan = STYLED[name]
        module, tokens = parallelize_module(build(), mesh, plan), torch.randint(0, 16, (2, 4))
        program = saved_and_loaded(torch.export.export(module, (tokens,)))
        other = tokens.flip(0)
        assert_same(program.module()(other), module(other))


def test_a_mesh_with_two_axes() -> None:
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        x = distribute_tensor(torch.randn(4, 8), mesh["dp"], [Shard(0)])
        program = saved_and_loaded(torch.export.export(module, (x,)))
        assert_same(program.module()(x * 2), module(x * 2))


@pytest.mark.parametrize("strict", [False, True])
def test_a_batch_of_any_size(strict: bool) -> None:
    with lone_rank() as mesh:
        module, x = module_and_input("styles_with_local_outputs", mesh)
        exported = torch.export.export(module, (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        program = saved_and_loaded(exported).module()
        for size in (4, 6, 9):
            batch = torch.randn(size, 8)
            assert_same(program(batch), module(batch))
    torch.compiler.reset()


def test_gradients_of_an_exported_program() -> None:
    with lone_rank() as mesh:
        module, x = module_and_input("sequence_parallel", mesh)
        program = saved_and_loaded(torch.export.export(module, (x,))).module()
        for runs in (module, program):
            runs(x).square().sum().backward()
        for parameter, loaded in zip(module.parameters(), program.parameters(), strict=True):
            assert parameter.grad is not None
            assert loaded.grad is not None
            assert_same(loaded.grad, parameter.grad)


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
def test_decompositions_leave_local_ops_and_collectives() -> None:
    with lone_rank() as mesh:
        module, x = module_and_input("sequence_parallel", mesh)
        local = torch.export.export(module, (x,)).run_decompositions()
        targets = {str(node.target) for node in local.graph.nodes if node.op == "call_function"}
        assert not any(target.startswith("shardwise") for target in targets)
        collectives = {target.partition(".")[2] for target in targets if target.startswith("_c10d_functional")}
        assert collectives == {"all_gather_into_tensor.default", "reduce_scatter_tensor.default", "wait_tensor.default"}
        assert_same(local.module()(x * 2), module(x * 2))


@on_processes
def test_on_processes() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain = Block()
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    module = parallelize_module(copy.deepcopy(plain), mesh, plan)
    x = torch.randn(2, 8, 8)
    shard = x.chunk(4, 1)[mesh.get_local_rank()]
    program = saved_and_loaded(torch.export.export(module, (shard,)))
    expected = plain(x).chunk(4, 1)[mesh.get_local_rank()]
    torch.testing.assert_close(program.module()(shard), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_factories_and_random_numbers(strict: bool) -> None:
    with lone_rank() as mesh:
        options: dict[str, Any] = {"device_mesh": mesh, "placements": [Shard(0)]}

        def made(x: Tensor) -> Tensor:
            return x * shardwise.full((8, 4), 3.0, **options) + shardwise.ones(8, 4, **options) + torch.randn_like(x)

        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        program = saved_and_loaded(torch.export.export(Calls(made), (x,), strict=strict)).module()
        torch.manual_seed(3)
        expected = made(x)
        torch.manual_seed(3)
        assert_same(program(x), expected)
        with pytest.raises(Exception, match="randn_like"):
            torch.export.export(Calls(lambda x: x * shardwise.randn(8, 4, **options)), (x,), strict=strict)
    torch.compiler.reset()


def test_a_placement_that_programs_cannot_hold() -> None:
    class Other(Partial):
        pass

    with lone_rank() as mesh:
        module = Calls(lambda x: DTensor.from_local(x, mesh, [Other()]))
        with pytest.raises(InputError, match="cannot hold"):
            torch.export.export(module, (torch.ones(2),))


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(-1), Replicate(), Partial("avg")),
        (InterleavedShard(0, 2), OrderedShard(1, 3)),
        (),
        P("dp", None, partial={"tp": "sum"}),
        P(("dp", "tp"), None),
    ],
    ids=str,
)
def test_placements_as_text(placements: Placements) -> None:
    assert placements_from(text_of(placements)) == placements


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    with lone_rank() as mesh:
        function, arguments = CASES["products"](Make(mesh))
        arguments = [value.detach() for value in arguments]
        graph = make_fx(function, tracing_mode=mode)(*arguments)
        others = [value * 2 for value in arguments]
        result, expected = graph(*others), function(*others)
        assert result.spec is expected.spec  # type: ignore[attr-defined]
        torch.testing.assert_close(result.to_local(), expected.to_local())  # type: ignore[attr-defined]


def moved(x: DTensor, y: DTensor) -> Tensor:
    return (x.redistribute(placements=[Replicate()]) * 2 + y.redistribute(placements=[Replicate()])).relu()


def local(x: DTensor, y: DTensor) -> Tensor:
    return x.to_local() * 2 + (x * y).to_local()  # type: ignore[attr-defined]


def gathered(x: DTensor, y: DTensor) -> Tensor:
    return (x + y).full_tensor().sum(1)  # type: ignore[attr-defined]


def gradient(x: DTensor, y: DTensor) -> Tensor:
    product = x.redistribute(placements=[Replicate()]) * y.redistribute(placements=[Replicate()])
    return torch.autograd.grad(product.sum(), x)[0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("function", [moved, local, gathered, gradient], ids=lambda function: function.__name__)
def test_make_fx_of_conversions(function: Callable[..., Tensor], mode: str) -> None:
    with lone_rank() as mesh:
        make = Make(mesh)

        def arguments(size: int) -> list[Tensor]:
            made = [make(size, 4) for _ in range(2)]
            return made if function is gradient else [value.detach() for value in made]

        graph = make_fx(function, tracing_mode=mode)(*arguments(8))
        for size in (8, 16) if mode == "symbolic" else (8,):
            given = arguments(size)
            result, expected = graph(*given), function(*given)
            assert type(result) is type(expected)
            if isinstance(result, DTensor) and isinstance(expected, DTensor):
                assert result.spec is expected.spec
                result, expected = result.to_local(), expected.to_local()
            torch.testing.assert_close(result, expected)
