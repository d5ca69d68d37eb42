"""Check a rule by brute force: shard, run the op on every rank, assemble, compare with the op on global tensors."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from shardwise.notation import Bound, Rule, bind, local_size, output_layout, parse, passes, sharded_layout, summands
from shardwise.sharding.layout import Layout

REDUCE = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0),
}
IDENTITY = {"sum": 0.0, "max": -torch.inf, "min": torch.inf, "product": 1.0}


def shape_of(value: Any) -> Any:
    if value is None:
        return None
    return tuple(value.shape) if isinstance(value, Tensor) else [shape_of(v) for v in value]


def nested(function: Any, bound: Any, value: Any) -> Any:
    """`function(bound tensor, tensor)` for one tensor, a list of tensors, or None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return function(bound, value)
    return [nested(function, b, v) for b, v in zip(bound, value, strict=True)]


def indices(layout: Layout, coordinate: tuple[int, ...]) -> tuple[Tensor, ...]:
    rows = [
        torch.tensor([i for low, high in runs for i in range(low, high)], dtype=torch.long)
        for runs in layout.runs(coordinate)
    ]
    return tuple(r.view(-1, *[1] * (len(rows) - d - 1)) for d, r in enumerate(rows))


def part(layout: Layout, coordinate: tuple[int, ...], tensor: Tensor) -> Tensor:
    return tensor[indices(layout, coordinate)].clone() if tensor.ndim else tensor


def leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) or value is None else [leaf for v in value for leaf in leaves(v)]


def assemble(layout: Layout, parts: dict[tuple[int, ...], Tensor | None], like: Tensor) -> Tensor:
    """The global tensor from what each rank has; None from a rank that had nothing to work on."""
    partial = dict(layout.partial)
    summands: dict[tuple[int, ...], Tensor] = {}
    for coordinate, local in parts.items():
        key = tuple(coordinate[axis] for axis in partial)
        whole = summands.setdefault(key, torch.full(like.shape, torch.nan, dtype=torch.double))
        expected = layout.local_shape(coordinate)
        if local is None:
            op = next(iter(partial.values()), "sum")
            local = torch.full(expected, IDENTITY[op], dtype=torch.double)
        assert tuple(local.shape) == expected, (
            f"rank {coordinate} yields {tuple(local.shape)}, {layout} says {expected}"
        )
        where = indices(layout, coordinate) if like.ndim else ()
        known, local = whole[where], local.double()
        assert bool((known.isnan() | torch.isclose(known, local, atol=1e-6)).all()), "replicas differ"
        whole[where] = local
    result = torch.stack(list(summands.values()))
    return REDUCE[next(iter(partial.values()), "max")](result)


def shardable(bound: Bound, pieces: int, kernels: bool = False) -> list[int]:
    return [
        i
        for i, factor in enumerate(bound.factors)
        if not factor.must_replicate
        and factor.handled_by_kernel <= kernels
        and not (factor.even and factor.size % pieces)
    ]


def check_shardings(rule: Rule, fn: Any, tensors: Any, arguments: Any, bound: Bound, mesh: Any, shardings: Any) -> None:
    whole = fn(*tensors, **arguments)
    expected = list(whole) if len(rule.outputs) > 1 else [whole]
    pieces: list[list[dict[Any, Any]]] = [[{} for _ in leaves(value)] for value in expected]
    for coordinate in itertools.product(*map(range, mesh)):
        cut = lambda b, t: part(sharded_layout(b, bound, mesh, shardings), coordinate, t)  # noqa: B023, E731
        local = [nested(cut, b, t) for b, t in zip(bound.inputs, tensors, strict=True)]
        for axis, factor in shardings:
            for i in summands(bound, factor) if coordinate[axis] else ():
                local[i] = nested(lambda _, t: torch.zeros_like(t), local[i], local[i])
        sizes = {n: local_size(bound, n, v, mesh, shardings, coordinate) for n, v in arguments.items()}
        # An op is never called on an empty shard, unless it is all the same.
        empty = any(t is not None and t.numel() == 0 for t in leaves(local))
        result = None if empty else fn(*local, **sizes)
        results = [None] * len(expected) if empty else list(result) if len(rule.outputs) > 1 else [result]
        for index, value in enumerate(results):
            for i, leaf in enumerate(leaves(value) if value is not None else [None] * len(pieces[index])):
                pieces[index][i][coordinate] = leaf
    for index, value in enumerate(expected):
        shapes = bound.outputs[index]
        for i, leaf in enumerate(leaves(value)):
            layout = output_layout(
                shapes[i] if isinstance(value, (list, tuple)) else shapes, bound, index, mesh, shardings
            )
            rebuilt = assemble(layout, pieces[index][i], leaf)
            text = f"{bound!r}, output {index}, {mesh}, {shardings}"
            torch.testing.assert_close(rebuilt, leaf.double(), atol=1e-4, rtol=1e-4, msg=lambda m, t=text: f"{t}: {m}")


def check_passing(rule: Rule, fn: Any, tensors: Any, arguments: Any, bound: Bound) -> int:
    """Partial operands that the rule lets pass: the outputs' reduction is the global result."""
    whole = leaves(fn(*tensors, **arguments))
    count = 0
    for op in REDUCE:
        for operands, result_op in passes(bound, op):
            noise = [torch.randn(2) for _ in tensors]

            def split(t: Tensor, rank: int, op: str = op, noise: Any = noise) -> Tensor:
                delta = torch.linspace(0.1, 1, t.numel()).view(t.shape)
                if op == "sum":
                    return delta if rank else t - delta
                if op == "avg":
                    return t + delta if rank else t - delta
                low, high = (t - delta, t) if op == "max" else (t, t + delta)
                return torch.where((delta > 0.5) == bool(rank), low, high)

            ranks = []
            for rank in range(2):
                local = [
                    nested(lambda _, t, rank=rank: split(t, rank), t, t) if i in operands else t
                    for i, t in enumerate(tensors)
                ]
                ranks.append(leaves(fn(*local, **arguments)))
            for expected, *parts in zip(whole, *ranks, strict=True):
                rebuilt = REDUCE[result_op](torch.stack([p.double() for p in parts]))
                torch.testing.assert_close(rebuilt, expected.double(), atol=1e-4, rtol=1e-4)
                count += 1
    return count


def check(text: str, fn: Any, *tensors: Any, sizes: Any = None, **arguments: Any) -> Bound:
    """Try every factor over 2, 3 and 5 ranks, every pair of factors on a 2 x 2 mesh, and every way Partial passes."""
    rule = parse(text)
    whole = fn(*tensors, **arguments)
    outputs = [shape_of(o) for o in (whole if len(rule.outputs) > 1 else [whole])]
    bound = bind(rule, [shape_of(t) for t in tensors], outputs, (sizes or {}) | arguments)
    for pieces in (2, 3, 5):
        for factor in shardable(bound, pieces):
            check_shardings(rule, fn, tensors, arguments, bound, (pieces,), ((0, factor),))
    for first, second in itertools.product(shardable(bound, 4), repeat=2):
        check_shardings(rule, fn, tensors, arguments, bound, (2, 2), ((0, first), (1, second)))
        check_shardings(rule, fn, tensors, arguments, bound, (2, 2), ((1, first), (0, second)))
    check_passing(rule, fn, tensors, arguments, bound)
    return bound
