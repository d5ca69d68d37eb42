"""Running an op on every rank: arguments are split by rank, results are joined.

>>> run(describe(torch.ops.aten.add.Tensor), (x, 1), None)
RankTensor(...)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from ..errors import WorldError
from .agreement import agreed
from .generators import generator_for, states_of_ranks
from .rank_int import values_of
from .rank_op import RankOp
from .rank_tensor import RankTensor, wrap

__all__ = ["by_rank", "flat", "join", "join_views", "map_op", "common_number_of_ranks", "run", "run_view"]

# Most arguments have one of these types, and the same value on all ranks.
_SHARED = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def run(op: RankOp, args: Sequence[object], kwargs: dict[str, object] | None) -> object:
    """Run an op that returns new tensors or values."""
    return join(map_op(op, args, kwargs), op.name)


def run_view(op: RankOp, args: Sequence[object], kwargs: dict[str, object] | None) -> object:
    """Run an op that returns views of its first argument."""
    results = map_op(op, args, kwargs)
    return join_views(results, args[0]) if torch.is_inference_mode_enabled() else join(results, "view")


# ---- splitting arguments ------------------------------------------------------------------------------------------


def by_rank(value: object) -> Sequence[object] | None:
    """Return the value of an argument on each rank, or None if all ranks get the argument unchanged."""
    if isinstance(value, RankTensor):
        return value.shards
    if isinstance(value, (list, tuple)):
        columns = [by_rank(item) for item in value]
        lengths = {len(c) for c in columns if c is not None}
        if not lengths:
            return None
        n = common_number_of_ranks(lengths)
        filled = (repeat(v, n) if c is None else c for v, c in zip(value, columns, strict=True))
        return list(zip(*filled, strict=True))
    return values_of(value)


def common_number_of_ranks(lengths: set[int]) -> int:
    """Return the only element of a set of numbers of ranks; raise an error if there are several."""
    if len(lengths) > 1:
        raise WorldError(
            f"an op got tensors of {' and '.join(map(str, sorted(lengths)))} ranks",
            "use tensors of one simulated world together",
        )
    return lengths.pop()


# ---- calling ------------------------------------------------------------------------------------------------------


def map_op(op: RankOp, args: Sequence[object], kwargs: dict[str, object] | None) -> list[object]:
    """Call an op on every rank and return the results of all ranks. This is the hot loop of a simulated world."""
    columns: list[Iterable[object]] = []
    n = 0
    for value in args:
        if type(value) is RankTensor:
            column: Sequence[object] | None = value.shards
        else:
            column = None if type(value) in _SHARED else by_rank(value)
        if column is None:
            columns.append(repeat(value))
            continue
        if n != len(column):
            n = common_number_of_ranks({n or len(column), len(column)})
        columns.append(column)
    if op.random or (kwargs and not _SHARED.issuperset(map(type, kwargs.values()))):
        return _map_named(op, columns, kwargs or {}, n)
    call = partial(op.call, **kwargs) if kwargs else op.call
    return list(map(call, *columns))


Call = tuple[list[object], dict[str, object]]


def _map_named(op: RankOp, columns: list[Iterable[object]], kwargs: dict[str, object], n: int) -> list[object]:
    """Call an op on every rank where arguments passed by name may differ between ranks, or the op is random."""
    named = {name: by_rank(value) for name, value in kwargs.items()}
    n = common_number_of_ranks({len(c) for c in named.values() if c is not None} | ({n} if n else set()))
    calls: list[Call] = [
        (row, {name: kwargs[name] if c is None else c[rank] for name, c in named.items()})
        for rank, *row in zip(range(n), *columns, strict=False)
    ]
    if op.random:
        return _map_random(op, calls)
    return [op.call(*row, **by_name) for row, by_name in calls]


_drawing = threading.RLock()  # a draw of another thread between those of two ranks would make the ranks differ


def _map_random(op: RankOp, calls: list[Call]) -> list[object]:
    """Call a random op on every rank as if each were a process with the same seed: all start from one state.

    Ranks that were seeded differently (`seed_ranks`) start from their own states. Rank 0, which has the largest shard,
    draws last, so that the generator is left in the state of rank 0.
    """
    row, by_name = calls[0]
    arguments = [*row, *by_name.values()]
    devices = (a.device for a in flat(arguments) if isinstance(a, torch.Tensor))
    named = by_name.get("device")
    device = next(devices, named if isinstance(named, torch.device) else torch.device("cpu"))
    generator = generator_for(arguments, device)
    results = []
    with _drawing:
        state = generator.get_state()
        own = states_of_ranks(generator, len(calls))
        for rank, (row, by_name) in reversed(list(enumerate(calls))):
            generator.set_state(state if own is None else own[rank])
            results.append(op.call(*row, **by_name))
            if own is not None:
                own[rank] = generator.get_state()
    return results[::-1]


def flat(values: Iterable[object]) -> Iterator[object]:
    """Yield the values in nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


# ---- joining results ----------------------------------------------------------------------------------------------


def join(results: Sequence[Any], name: str) -> Any:
    """Return one result for those of all ranks: a RankTensor of tensors, and other values if all ranks agree."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return wrap(tuple(results))
    if first is None:
        return None
    if isinstance(first, (tuple, list)):
        agreed([len(result) for result in results], f"the number of results of {name}")
        return type(first)(join(column, name) for column in zip(*results, strict=True))
    return agreed(results, name)


def join_views(results: Sequence[object], base: object) -> object:
    """Join results that are views of `base`."""
    if torch.is_inference_mode_enabled() and isinstance(base, torch.Tensor) and not base.is_inference():
        # A view shares the version counter of its base, which an inference tensor does not have.
        with torch.inference_mode(False):
            return join(results, "view")
    return join(results, "view")
