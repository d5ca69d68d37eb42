"""Mistakes are raised at once, on all ranks alike, simulated and on processes, and nothing hangs afterwards."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import InterleavedShard, Partial, Replicate, Shard, distribute_tensor
from shardwise.errors import CommunicationError, LayoutError, MeshError, MixedTensorError
from tests.processes.pool import on_processes

X = torch.arange(24.0).view(6, 4)


class Tensors:
    """What the rows use."""

    def __init__(self) -> None:
        self.line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.rows = distribute_tensor(X, self.line, [Shard(0)])
        self.even = distribute_tensor(torch.ones(4, 4), self.line, [Shard(0)])
        self.columns = distribute_tensor(X, self.line, [Shard(1)])
        self.other = distribute_tensor(X, self.square, [Shard(0), Replicate()])


def explicit(fn: Callable[[Tensors], Any]) -> Callable[[Tensors], Any]:
    def call(t: Tensors) -> None:
        with shardwise.explicit():
            fn(t)

    return call


ROWS: dict[str, tuple[Callable[[Tensors], Any], type[Exception], str]] = {
    "two meshes": (lambda t: t.rows + t.other, MeshError, "different meshes"),
    "a plain tensor": (lambda t: t.rows + X, MixedTensorError, "mixes distributed tensors with a plain tensor"),
    "shapes of a product": (lambda t: t.rows @ t.columns, RuntimeError, "6x4 and 6x4"),
    "shapes that do not broadcast": (lambda t: t.rows + t.rows[:4], RuntimeError, "size of tensor a"),
    "a view": (lambda t: t.rows.view(5, 5), RuntimeError, "shape '\\[5, 5\\]' is invalid for input of size 24"),
    "a dim": (lambda t: t.rows.sum(3), IndexError, "Dimension out of range"),
    "an index": (lambda t: t.rows.select(0, 9), IndexError, "out of range"),
    "cat": (lambda t: torch.cat([t.rows, t.rows[:, :2]]), RuntimeError, "Sizes of tensors must match"),
    "a dtype": (lambda t: t.even @ t.even.T.double(), RuntimeError, "dtype"),
    "explicit": (explicit(lambda t: t.rows + t.columns), CommunicationError, "(self|other) = \\1.redistribute"),
    "an impossible cut": (
        lambda t: t.rows.redistribute(placements=[InterleavedShard(0, 4)]),
        LayoutError,
        "6",
    ),
}


def attempt(row: str) -> str:
    """The text of the error, after a check of its type."""
    call, error, _ = ROWS[row]
    with pytest.raises(error) as caught:
        call(Tensors())
    return str(caught.value)


@pytest.mark.parametrize("row", ROWS)
def test_simulated(row: str) -> None:
    with shardwise.simulate(4):
        text = attempt(row)
        assert re.search(ROWS[row][2], text), text


@on_processes
def test_on_processes() -> None:
    for row in ROWS:
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, attempt(row))
        assert len(set(texts)) == 1, texts
    # The ranks are still in step.
    tensors = Tensors()
    total = (tensors.rows + tensors.columns).redistribute(placements=[Replicate()])
    assert torch.equal(total.to_local(), 2 * X)


def test_the_same_error_as_plain_tensors() -> None:
    """Shape errors are PyTorch's own, by type and by text."""
    for row, plain in {
        "shapes of a product": lambda: X @ X,
        "shapes that do not broadcast": lambda: X + X[:4],
        "a view": lambda: X.view(5, 5),
        "a dim": lambda: X.sum(3),
        "an index": lambda: X.select(0, 9),
    }.items():
        with pytest.raises(ROWS[row][1]) as caught:
            plain()
        with shardwise.simulate(4):
            assert attempt(row) == str(caught.value)


@on_processes
def test_explicit_mode_on_processes() -> None:
    tensors = Tensors()
    with shardwise.explicit():
        assert (tensors.rows * 2).placements == (Shard(0),)
        assert tensors.rows.sum(0).placements == (Partial("sum"),)
        with pytest.raises(CommunicationError):
            tensors.rows.argmax(0)
        whole = tensors.rows.redistribute(placements=[Replicate()])
        assert torch.equal(whole.argmax(0).to_local(), X.argmax(0))
