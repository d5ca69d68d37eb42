"""Compiled functions and worlds: nothing that the compiler keeps holds a world, and no graph serves another world."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import DTensor, Replicate, Shard
from shardwise.errors import MeshError
from shardwise.sharding.mesh import MeshInfo, mesh_info_of
from tests.compile.cases import CASES, Make
from tests.compile.test_compile import WORLDS, results


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def assert_gone_after(world: str, program: Callable[[DeviceMesh], object]) -> None:
    """Run a program in a world. Afterwards, when the compiler has forgotten it, the MeshInfo of the world is gone."""

    def run() -> weakref.ref[MeshInfo]:
        with WORLDS[world]() as mesh:
            program(mesh)
            return weakref.ref(mesh_info_of(mesh))

    mesh_info = run()
    with WORLDS["simulated"]():
        pass  # the runtime of a destroyed process group is dropped when the next world begins
    torch.compiler.reset()
    for _ in range(2):  # the first one drops cycles of Dynamo's own, in which C++ objects hold tensors
        gc.collect()
    assert mesh_info() is None


@pytest.mark.parametrize(
    ("name", "world"),
    [*((name, "simulated") for name in CASES), ("ops", "processes"), ("sequence_parallel", "processes")],
)
def test_a_compiled_function_does_not_keep_its_world(name: str, world: str) -> None:
    def program(mesh: DeviceMesh) -> None:
        function, arguments = CASES[name](Make(mesh))
        results(torch.compile(function, backend="aot_eager"), arguments)

    assert_gone_after(world, program)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_exported_program_does_not_keep_its_world() -> None:
    def program(mesh: DeviceMesh) -> None:
        function, arguments = CASES["sequence_parallel"](Make(mesh))
        assert isinstance(function, torch.nn.Module)
        exported = torch.export.export(function, tuple(x.detach() for x in arguments))
        exported.module()(*arguments)

    assert_gone_after("processes", program)


def test_a_recorded_graph_does_not_keep_its_world() -> None:
    def program(mesh: DeviceMesh) -> None:
        function, arguments = CASES["redistribute"](Make(mesh))
        make_fx(function)(*arguments)(*arguments)

    assert_gone_after("processes", program)


# ---- a graph is for its world ---------------------------------------------------------------------------------------


def of_mesh(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return (DTensor.from_local(x, mesh, [Shard(0)]) * 2).redistribute(placements=[Replicate()])


def of_tensor(x: DTensor, mesh: DeviceMesh) -> Tensor:
    return (x * 2).redistribute(placements=[Replicate()])


@pytest.mark.parametrize("second", WORLDS)
@pytest.mark.parametrize("first", WORLDS)
@pytest.mark.parametrize("function", [of_mesh, of_tensor], ids=lambda function: function.__name__)
def test_a_graph_is_not_run_in_another_world(function: Any, first: str, second: str) -> None:
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for world in (first, second):  # their meshes are equal, if both are of one kind
        with WORLDS[world]() as mesh:
            x = torch.randn(8, 4)
            argument = x if function is of_mesh else Make(mesh).of(x, Shard(0))
            found, expected = compiled(argument, mesh), function(argument, mesh)
            assert found.spec is expected.spec
            assert found.spec.mesh_info is mesh_info_of(mesh)
            assert repr(found.to_local()) == repr(expected.to_local())


def test_the_context_of_a_tensor() -> None:
    def program(mesh: DeviceMesh) -> tuple[Any, Any, Tensor]:
        x = Make(mesh)(8, 4)
        context: Any = x.__tensor_flatten__()[1]
        assert context == copy.deepcopy(context) == pickle.loads(pickle.dumps(context))
        assert context != Make(mesh)(8, 4, on=Replicate()).__tensor_flatten__()[1]
        return context, x.detach().__tensor_flatten__()[1], torch.randn(2, 4)

    with WORLDS["processes"]() as mesh:
        context, _, local = program(mesh)
    with WORLDS["processes"]() as mesh:  # an equal mesh of another world
        of_other, *_ = program(mesh)
        assert context != of_other
        assert not DTensor.__metadata_guard__(context, of_other)
        gc.collect()
        assert context.mesh() is None
        assert context != of_other
        assert isinstance(hash(context), int)
        with pytest.raises(MeshError, match="whose world has ended"):
            DTensor.__tensor_unflatten__({"_local_tensor": local}, context, (8, 4), (4, 1))
