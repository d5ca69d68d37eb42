"""Explicit mode: communication that nobody asked for is an error, whose advice works as it stands."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, InterleavedShard, P, Partial, Placement, Replicate, Shard
from shardwise.errors import CommunicationError
from shardwise.testing import assemble
from tests.ops.helpers import on, r, ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SUM, PRODUCT = Partial("sum"), Partial("product")
aten = torch.ops.aten
Call = tuple[Callable[..., Any], list[tuple[str, torch.Tensor, Placement]], dict[str, Any]]


@torch.library.custom_op("shardwise_tests::without_a_rule", mutates_args=())
def without_a_rule(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@without_a_rule.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


X, Y = r(6, 4), r(6, 4, seed=1)
MOVING: dict[str, Call] = {
    "two cuts": (aten.add.Tensor, [("self", X, S0), ("other", Y, S1)], {}),
    "a product of sums": (aten.mul.Tensor, [("self", X, SUM), ("other", Y, SUM)], {}),
    "not linear": (aten.relu.default, [("self", X, SUM)], {}),
    "a matrix product": (aten.mm.default, [("self", X, S0), ("mat2", r(4, 3), S0)], {}),
    "a bias": (aten.addmm.default, [("self", r(3), SUM), ("mat1", X, S0), ("mat2", r(4, 3), S0)], {}),
    "a kernel": (aten.argmax.default, [("self", X, S0)], {"dim": 0}),
    "a scan": (aten.cumsum.default, [("self", X, S0)], {"dim": 0}),
    "softmax over a cut dim": (aten._log_softmax.default, [("self", X, S1)], {"dim": 1, "half_to_float": False}),
    "written": (aten.add_.Tensor, [("self", X, S0), ("other", Y, S1)], {}),
    "a sum written": (aten.mul_.Tensor, [("self", X, S0), ("other", Y, SUM)], {}),
    "sort": (aten.sort.default, [("self", X, S0)], {"dim": 0}),
    "an op that runs on gathered inputs": (without_a_rule._opoverload, [("x", X, S0)], {}),
    "sizes that are local ones": (aten.expand.default, [("self", X[:1], PRODUCT)], {"size": [6, 4]}),
    "a list": (aten.cat.default, [("tensors[0]", X, S0), ("tensors[1]", Y, S1)], {"dim": 1}),
}


def call(func: Callable[..., Any], tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call an op with its tensors by name; `tensors[0]`, `tensors[1]`, ... are one list."""
    listed = [value for name, value in tensors.items() if "[" in name]
    named = {name: value for name, value in tensors.items() if "[" not in name}
    first = {next(iter(tensors)).partition("[")[0]: listed} if listed else {}
    return func(**first, **named, **options)


def advised(tensors: dict[str, DTensor], advice: str) -> dict[str, Any]:
    """The tensors after the statements of an error's advice were executed as they stand."""
    names = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial, "InterleavedShard": InterleavedShard, "P": P}
    for name, value in tensors.items():
        base, bracket, _ = name.partition("[")
        names.setdefault(base, []).append(value) if bracket else names.update({name: value})
    exec(advice, names)
    return {name: eval(name, names) for name in tensors}


@pytest.mark.filterwarnings("ignore::shardwise.dispatch.fallback.GatherWarning")
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", MOVING)
def test_the_advice_works(case: str, sizes: tuple[int, ...]) -> None:
    func, given, options = MOVING[case]
    plain = call(func, {name: value.clone() for name, value, _ in given}, options)
    with ranks(*sizes) as mesh, torch.no_grad():
        tensors = {name: on(mesh, value, *[placement] * mesh.ndim) for name, value, placement in given}
        with shardwise.explicit():
            with pytest.raises(CommunicationError, match="in explicit mode") as caught:
                call(func, tensors, options)
            text = str(caught.value)
            assert text.startswith(str(getattr(func, "name", lambda: func)()).replace("::", ".").partition(".d")[0])
            advice = re.fullmatch(r".*: redistribute first: (.*)", text, re.DOTALL)
            assert advice, text
            result = call(func, advised(tensors, advice[1]), options)
        for found, wanted in zip(_each(result), _each(plain), strict=True):
            torch.testing.assert_close(assemble(found), wanted)


def _each(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def test_what_the_message_says() -> None:
    with ranks(2) as mesh, shardwise.explicit():
        with pytest.raises(CommunicationError) as caught:
            torch.add(on(mesh, X, S0), on(mesh, Y, S1))
        assert str(caught.value) == (
            "aten.add.Tensor needs communication in explicit mode (other: f32[6, 4@a] -> f32[6@a, 4]): "
            "redistribute first: other = other.redistribute(placements=[Shard(0)])"
        )


LOCAL: dict[str, tuple[Callable[..., Any], list[tuple[torch.Tensor, Placement]]]] = {
    "add": (torch.add, [(X, S0), (Y, S0)]),
    "a sum of sums": (torch.add, [(X, SUM), (Y, SUM)]),
    "scaled": (lambda x: 2 * x, [(X, SUM)]),
    "rows": (torch.mm, [(X, S0), (r(4, 3), R)]),
    "columns": (torch.mm, [(X, R), (r(4, 3), S1)]),
    "inner": (torch.mm, [(X, S1), (r(4, 3), S0)]),
    "linear": (F.linear, [(X, S0), (r(3, 4), R), (r(3), R)]),
    "softmax": (lambda x: x.softmax(1), [(X, S0)]),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), [(X, S0)]),
    "view": (lambda x: x.view(3, 2, 4), [(X, S1)]),
    "transposed": (torch.t, [(X, S0)]),
    "mean": (lambda x: x.mean(), [(X, S0)]),
    "sum": (lambda x: x.sum(0), [(X, S0)]),
    "gelu": (F.gelu, [(X, S1)]),
    "in place": (lambda x, y: x.mul_(y), [(X, S0), (Y, S0)]),
}


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", LOCAL)
def test_what_needs_none_passes(case: str, sizes: tuple[int, ...]) -> None:
    fn, given = LOCAL[case]
    wanted = fn(*(value.clone() for value, _ in given))
    with ranks(*sizes) as mesh, torch.no_grad():
        tensors = [on(mesh, value, placement) for value, placement in given]
        with shardwise.explicit():
            found = fn(*tensors)
        torch.testing.assert_close(assemble(found), wanted)


def test_redistribute_is_allowed_and_so_is_what_asks_for_a_value() -> None:
    with ranks(2) as mesh, shardwise.explicit():
        x = on(mesh, X, S0, grad=True)
        y = x.redistribute(placements=[R])
        torch.testing.assert_close(y.to_local().detach().shards[0], X)
        torch.testing.assert_close(x.full_tensor().detach().shards[0], X)
        y.sum().backward()
        torch.testing.assert_close(assemble(x.grad), torch.ones(6, 4))


def test_it_ends_with_its_block() -> None:
    with ranks(2) as mesh:
        x, y = on(mesh, X, S0), on(mesh, Y, S1)
        with shardwise.explicit():
            with shardwise.explicit(False):
                x + y
            with pytest.raises(CommunicationError):
                x + y
        torch.testing.assert_close(assemble(x + y), X + Y)


def test_backward_is_held_to_it_too() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, S0, grad=True)
        y = x.redistribute(placements=[S1])
        loss = (y * y).sum()
        with shardwise.explicit():
            loss.backward()  # the way back of a redistribute was asked for
        torch.testing.assert_close(assemble(x.grad), 2 * X)
