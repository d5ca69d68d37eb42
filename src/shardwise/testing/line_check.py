"""Check whether a line of the table allows exactly the splits of a call that were found by trying it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .._torch.ops import schema_of
from ..notation import BindError, Bound, BoundTensor, RuleError, bind, parse
from .probe_call import ProbeCall
from .split_dims import SplitDims


def ranks_were_tried(text: str, calls: Sequence[ProbeCall]) -> bool:
    """Return whether every pattern with an ellipsis was tried with tensors of at least two ranks."""
    rule = parse(text)
    for position, pattern in enumerate((*rule.inputs, *rule.outputs)):
        if not any(atom.many for dim in pattern.dims for atom in dim):
            continue
        tensors = [t for call in calls for t in _tensors_at(call, position)]
        if tensors and len({t.dim() for t in tensors}) < 2:
            return False
    return True


def _tensors_at(setup: ProbeCall, position: int) -> list[Tensor]:
    """Return the tensors at a position: operands first, then results."""
    if position < len(setup.names):
        return setup.tensors(position)
    results = setup.run() or []
    position -= len(setup.names)
    return results[position] if position < len(results) else []


def says(text: str, setup: ProbeCall, splits: Sequence[SplitDims]) -> bool:
    """Return whether a line allows exactly these splits in a call."""
    results = setup.run()
    if results is None:
        return True
    listed = [str(result.type) == "List[Tensor]" for result in schema_of(setup.func).returns] or [False] * len(results)
    outputs = [
        [tuple(t.shape) for t in tensors] if many else tuple(tensors[0].shape)
        for tensors, many in zip(results, listed, strict=True)
    ]
    given = [setup.arguments.get(name) for name in setup.names]
    shapes = [_shape(value) for value in given]
    try:
        rule = parse(text)
        sizes = {argument.name: setup.arguments[argument.name] for argument in rule.size_arguments}
        bound = bind(rule, shapes, outputs, sizes or None)
    except (BindError, RuleError, KeyError):
        return False
    return _allowed(bound) == {_Allowed(split.dims, _places(split), _reductions(split)) for split in splits}


def _shape(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return [_shape(element) for element in value] if isinstance(value, (list, tuple)) else None


class _Allowed(NamedTuple):
    dims: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, str], ...]


def _places(split: SplitDims) -> tuple[tuple[int, int], ...]:
    return tuple((i, dim) for i, (way, dim) in enumerate(split.ways) if way == "concat")


def _reductions(split: SplitDims) -> tuple[tuple[int, str], ...]:
    return tuple((i, way) for i, (way, _) in enumerate(split.ways) if way != "concat")


def _allowed(bound: Bound) -> set[_Allowed]:
    found = set()
    for index, factor in enumerate(bound.factors):
        if factor.must_replicate:
            continue
        dims = _where(bound.inputs, index)
        results = _where(bound.outputs, index)
        lacking = [i for i in range(len(bound.outputs)) if i not in dict(results)]
        found.add(_Allowed(dims, results, tuple((i, bound.rule.reduce[i]) for i in lacking)))
    return found


def _where(tensors: Sequence[object], factor: int) -> tuple[tuple[int, int], ...]:
    places = []
    for i, tensor in enumerate(tensors):
        for one in tensor if isinstance(tensor, tuple) and not isinstance(tensor, BoundTensor) else (tensor,):
            places += [(i, dim) for dim, factors in enumerate(one.dims if one is not None else ()) if factor in factors]
    return tuple(dict.fromkeys(places))
