"""`split` of distributed tensors: the pieces, their views and errors are those of one device, however it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import Partial, Placement, Replicate, Shard
from tests.ops.helpers import on, r, ranks, whole

X = r(6, 4, dtype=torch.float64)
CALLS: dict[str, Callable[[Any], Any]] = {
    "size": lambda x: x.split(2),
    "sizes": lambda x: x.split([1, 5]),
    "sizes in a tuple": lambda x: x.split((1, 2, 3)),
    "last is smaller": lambda x: x.split(4),
    "dim": lambda x: x.split(3, 1),
    "negative dim": lambda x: x.split(1, dim=-1),
    "function": lambda x: torch.split(x, 2),
    "op": lambda x: torch.ops.aten.split(x, 2),
    "chunk": lambda x: x.chunk(4),
    "unbind": lambda x: x.unbind(1),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_pieces(call: Callable[[Any], Any], placement: Placement) -> None:
    one = X.clone().requires_grad_()
    expected = call(one)
    (expected[0].square().sum() + expected[-1].sum()).backward()
    with ranks(4) as mesh:
        x = on(mesh, X, placement, grad=True)
        pieces = call(x)
        assert type(pieces) is type(expected)
        for piece, other in zip(pieces, expected, strict=True):
            torch.testing.assert_close(whole(piece.detach()), other.detach())
            assert (piece.stride(), piece.storage_offset()) == (other.stride(), other.storage_offset())
            assert piece._base is x
            assert piece.requires_grad
        (pieces[0].square().sum() + pieces[-1].sum()).backward()
        assert one.grad is not None
        torch.testing.assert_close(whole(x.grad), one.grad)


def test_pieces_may_not_be_written_where_autograd_records() -> None:
    with ranks(2) as mesh:
        for x in (X.clone().requires_grad_() * 1, on(mesh, X, Shard(1), grad=True) * 1):
            with pytest.raises(RuntimeError, match="returns multiple views"):
                x.split(2)[0].mul_(2)


def test_writes_to_pieces_are_writes_to_the_tensor() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(1))
        version = x._version
        x.split(2)[1].fill_(7.0)
        assert x._version > version
        assert (whole(x)[2:4] == 7).all()


@pytest.mark.parametrize("arguments", [(0,), (-1,), ([2, 2],), (2, 5), ("a",), (2, "b"), (2.5,)], ids=str)
def test_errors(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, TypeError, IndexError)) as expected:
        X.split(*arguments)
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(1))
        with pytest.raises(expected.type) as found:
            x.split(*arguments)
    assert str(found.value).replace("DTensor", "Tensor").splitlines()[0] == str(expected.value).splitlines()[0]


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def test_modes_see_the_call() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(1))
        with Functions() as functions:
            x.split(2)
        with Ops() as ops:
            x.split(2)
    assert "split" in functions.seen
    assert "aten.split.Tensor" in ops.seen


def test_without_autograd() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(1), grad=True)
        with torch.no_grad():
            assert all(piece.grad_fn is None for piece in x.split(2))
        with torch.inference_mode():
            torch.testing.assert_close(whole(x.split(2)[2]), X[4:])
            y = on(mesh, X, Shard(1))
            torch.testing.assert_close(whole(y.split(2)[2]), X[4:])
        torch.testing.assert_close(whole(y.split(2)[1]), X[2:4])


def test_under_vmap() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        found = torch.vmap(lambda row: row.split(2)[1] * 2)(x)
        torch.testing.assert_close(whole(found), X[:, 2:] * 2)
