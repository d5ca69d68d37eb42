"""Find shardings that a rule could allow but does not, by splitting inputs along a factor that must be replicated.

>>> probe(call)          # of aten::foo with the rule "a [b] -> a [b]"
[Suggestion(key='aten::foo', factor='b', found='concat 1', rule='a [b] -> a [b]')]

Agreement on a few inputs proves nothing, so these are hints for authors of rules. Run it in a child process: some ops
crash on slices of their inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import pytree
from ..dispatch.bind_call import BoundCall, Place
from ..sharding.mesh import MeshInfo
from .calls import bound_call
from .checker import tensors_in
from .combine import Way, ways_of_tensor
from .recording import Recorded

SMALLEST = 4  # the smallest size of a factor that is probed


class Suggestion(NamedTuple):
    """A factor that a rule replicates, and how each result could be combined from pieces that are split along it."""

    key: str
    factor: str
    found: str
    rule: str


def probe(call: Recorded, mesh_info: MeshInfo) -> list[Suggestion]:
    """Return factors that a rule replicates but that could be sharded, judged by this call and others of its shapes."""
    found = bound_call(call, mesh_info)
    if found is None or found.resolved.variant != "functional":
        return []
    suggestions = []
    for index, factor in enumerate(found.bound.factors):
        entries = [entry for _, entries in found.bound.size_args for entry in entries if isinstance(entry, tuple)]
        sized = any(index in entry for entry in entries)
        if not factor.must_replicate or factor.size < SMALLEST or sized:
            continue
        ways = _ways(call, found, index, factor.size)
        if ways and any(way != "same" for way in ways):
            text = f"{found.resolved.key}", factor.name, ", ".join(ways), str(found.bound.rule)
            suggestions.append(Suggestion(*text))
    return suggestions


def _ways(call: Recorded, found: BoundCall, factor: int, size: int) -> list[str]:
    """Return for each result the way that holds for all splits and data; an empty list if some result has none."""
    left: list[set[str]] | None = None
    for data in (call, *_other_data(call)):
        for bounds in _bounds(size):
            ways = _ways_of_one(data, found, factor, bounds)
            if ways is None:
                return []
            left = ways if left is None else [old & new for old, new in zip(left, ways, strict=True)]
            if not all(left):
                return []
    # A result that is the same for all pieces is also their maximum.
    return ["same" if "same" in ways else min(ways) for ways in left or []]


def _bounds(size: int) -> Iterator[list[int]]:
    yield [0, 1, size]
    yield [0, size // 2, size]
    yield [0, 1, size // 2 + 1, size]


def _other_data(call: Recorded) -> Iterator[Recorded]:
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)

        def shuffled(tensor: Tensor, generator: torch.Generator = generator) -> Tensor:
            # Most ops accept the same numbers in another order.
            order = torch.randperm(tensor.numel(), generator=generator)
            return tensor.flatten()[order].view(tensor.shape)

        yield Recorded(call.func, *pytree.tree_map_only(Tensor, shuffled, (call.args, call.kwargs)))


def _ways_of_one(call: Recorded, found: BoundCall, factor: int, bounds: list[int]) -> list[set[str]] | None:
    split = _dims_to_split(found, factor)
    if not split:
        return None
    try:
        expected = tensors_in(call.func(*call.args, **call.kwargs))
        pieces = [tensors_in(_on_piece(call, split, start, stop)) for start, stop in itertools.pairwise(bounds)]
    except Exception:
        return None
    if not expected or any(len(piece) != len(expected) for piece in pieces):
        return None
    return [_names(ways_of_tensor(want, [piece[i] for piece in pieces])) for i, want in enumerate(expected)]


def _dims_to_split(found: BoundCall, factor: int) -> dict[Place, int] | None:
    split: dict[Place, int] = {}
    for operand, place in zip(found.operands, found.places, strict=True):
        dims = [dim for dim, factors in enumerate(operand.tensor.dims) if factor in factors]
        if any(len(operand.tensor.dims[dim]) > 1 for dim in dims) or len(dims) > 1:
            return None
        if dims:
            split[place] = dims[0]
    return split


def _on_piece(call: Recorded, split: dict[Place, int], start: int, stop: int) -> object:
    def part(place: Place, value: object) -> object:
        dim = split.get(place)
        if dim is None or not isinstance(value, Tensor):
            return value
        return value.narrow(dim, start, stop - start).clone()

    args, kwargs = call.replaced(part)
    return call.func(*args, **kwargs)


def _names(ways: Iterable[Way]) -> set[str]:
    return {f"{way} {dim}" if way == "concat" else way for way, dim in ways}
