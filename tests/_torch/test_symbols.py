"""Sizes that the compiler holds as symbols: hashable, closed under arithmetic, guarded, and recorded op by op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardwise._torch.symbols import (
    SymbolicSize,
    common_divisor,
    has_symbols,
    hint,
    hinted,
    shape_inference,
    specialized,
    symbolic,
)


@pytest.fixture
def environment() -> ShapeEnv:
    return ShapeEnv()


def tensor(environment: ShapeEnv, *shape: int) -> Tensor:
    made: Tensor = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(shape), static_shapes=False)
    return made


def test_equal_sizes_have_one_hash(environment: ShapeEnv) -> None:
    rows, columns = symbolic(tensor(environment, 8, 6).shape)
    again = symbolic(tensor(environment, 8, 6).shape)
    assert isinstance(rows, SymbolicSize)
    assert {rows: 1, columns: 2} == {again[0]: 1, again[1]: 2}
    assert {rows * 2 // 2, rows, rows + 0} == {rows}
    assert not environment.guards


def test_sizes_of_other_compilations_differ(environment: ShapeEnv) -> None:
    other = ShapeEnv()
    one, two = (symbolic(tensor(each, 8).shape)[0] for each in (environment, other))
    assert one != two
    assert len({one, two}) == 2


def test_questions_are_answered_for_the_size_at_hand_and_guard_the_graph(environment: ShapeEnv) -> None:
    (rows,) = symbolic(tensor(environment, 8).shape)
    assert rows != 1  # sizes that may change are at least 2
    assert not environment.guards
    assert rows % 4 == 0
    assert [str(guard.expr) for guard in environment.guards] == [f"Eq(Mod({rows}, 4), 0)"]
    assert hint(rows * 3) == 24
    assert hinted((rows, [rows + 1], "text")) == (8, [9], "text")
    assert len(environment.guards) == 1
    assert specialized([rows]) == [8]
    assert symbolic(tensor(environment, 8).shape) == (8,)


def test_common_divisor(environment: ShapeEnv) -> None:
    rows, columns = symbolic(tensor(environment, 8, 6).shape)
    assert common_divisor(rows * columns * 4, columns * 6) == columns * 2
    assert common_divisor(rows, 8) == 1  # whatever the size is
    assert common_divisor(12, 8) == 4
    assert not environment.guards


def test_a_size_does_not_keep_its_compilation(environment: ShapeEnv) -> None:
    size = symbolic(tensor(environment, 8).shape)[0] * 2
    assert not any(isinstance(held, (ShapeEnv, SymNode)) for held in vars(size).values())


def test_shapes_of_results(environment: ShapeEnv) -> None:
    given = tensor(environment, 8, 6)
    shape = symbolic(given.shape)
    with given.fake_mode, shape_inference(shape):  # type: ignore[attr-defined]
        made = torch.empty(shape, device="meta") @ torch.empty(6, 4, device="meta")
    assert symbolic(made.shape)[0] == shape[0]
    assert has_symbols([made.shape])
    assert not has_symbols([(1, 2)])


def test_a_graph_computes_sizes_from_its_inputs() -> None:
    def function(x: Tensor) -> Tensor:
        rows, columns, depth = symbolic(x.shape)
        return x.reshape(rows * columns * depth * 2 // 2).mul(rows * columns * depth)

    graph = make_fx(function, tracing_mode="symbolic")(torch.ones(4, 5, 6))
    for shape in ((4, 5, 6), (7, 8, 9)):
        x = torch.ones(shape)
        torch.testing.assert_close(graph(x), function(x))
