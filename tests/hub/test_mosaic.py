"""Mosaics say which box of which source each box of a result is: compared with the functions on real tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.hub.mosaic import Mosaic


def assembled(mosaic: Mosaic, sources: dict[str, Tensor]) -> Tensor:
    """The tensor that a mosaic describes, put together piece by piece; elements of no piece are -1."""
    result = torch.full(mosaic.shape, -1.0)
    for piece in mosaic.pieces:
        box = torch.as_strided(sources[piece.source], piece.size, piece.strides, piece.offset)
        target = result
        for dim, (start, length) in enumerate(zip(piece.at, piece.size, strict=True)):
            target = target.narrow(dim, start, length)
        assert (target == -1).all(), "an element is in two pieces"
        target.copy_(box)
    return result


def _step(rng: random.Random, values: list[Any]) -> list[Any]:
    """The same random function of each value: of real tensors and of mosaics alike."""
    kind, seed = (
        rng.choice(["cat", "stack", "chunk", "split", "transpose", "squeeze", "select", "reshape"]),
        rng.random(),
    )
    return [_apply(kind, random.Random(seed), value) for value in values]


def _apply(kind: str, rng: random.Random, value: Any) -> Any:
    dims = value.dim()
    dim = rng.randrange(dims) if dims else 0
    if kind == "stack":
        return torch.stack([value, value], dim=rng.randrange(dims + 1))
    if kind == "reshape":
        return value.reshape(_factors(rng, value.numel()))
    if not dims:
        return value
    if kind == "cat":
        return torch.cat([value, value.narrow(dim, 0, 1), value], dim=dim)
    if kind == "chunk":
        return rng.choice(torch.chunk(value, rng.randint(1, 3), dim=dim)).contiguous()
    if kind == "split":
        first = rng.randint(0, value.shape[dim] - 1)
        return torch.split(value, [first, value.shape[dim] - first], dim=dim)[1]
    if kind == "transpose":
        return torch.transpose(value, dim0=dim, dim1=rng.randrange(dims)).contiguous()
    if kind == "squeeze":
        return value.squeeze()
    return rng.choice(value.unbind(dim)) if dims > 1 else value


def _factors(rng: random.Random, total: int) -> list[int]:
    """Sizes with this product."""
    sizes = []
    while total > 1 and len(sizes) < 3:
        sizes.append(rng.choice([size for size in range(1, total + 1) if total % size == 0]))
        total //= sizes[-1]
    return [*sizes, total] if rng.random() < 0.8 else [*sizes, 1, total]


@pytest.mark.parametrize("seed", range(200))
def test_random_conversions(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    source = torch.arange(float(torch.Size(shape).numel())).view(shape)
    values: list[Any] = [source, Mosaic.of("x", shape, torch.float32)]
    for _ in range(5):
        values = _step(rng, values)
    real, mosaic = values
    assert mosaic.shape == real.shape
    assert torch.equal(assembled(mosaic, {"x": source}), real)


def test_a_function_that_computes_is_refused_by_name() -> None:
    mosaic = Mosaic.of("x", (4, 4), torch.float32)
    with pytest.raises(InputError, match="calls 'add'"):
        mosaic.add(1)
    with pytest.raises(InputError, match=r"\[4, 4\] cannot be reshaped to \[3, 5\]"):
        mosaic.reshape(3, 5)
    with pytest.raises(InputError, match="calls 'relu'"):
        torch.relu(mosaic)
    with pytest.raises(InputError, match="cannot be concatenated"):
        torch.cat([mosaic, Mosaic.of("y", (3, 2), torch.float32)])
