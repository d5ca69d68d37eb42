"""Splitting factors as the layout of an operand splits its dims, such as a flattened `(batch, seq@tp)` dim.

The shards of a factor may be any index sets, as long as they are the same for all tensors that have the factor. So a
factor may be split as an operand's layout splits its dim, and the op then runs on that operand without communication.

>>> bound = bind(parse("m k, k n -> m n"), [(10, 6), (6, 8)])
>>> layout = Layout.make((4,), ((Factor(2, ()), Factor(5, (0,))), (Factor(6, ()),)))
>>> refine(bound, [(bound.inputs[0], layout)])
m_0=2 m_1=5 k=6 n=8: m k, k n -> m n
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from operator import mul

from ..sharding.layout import Layout
from .bind import Bound, BoundArgument, BoundFactor, BoundTensor
from .kind import FactorKind


def refine(
    bound: Bound, operands: Iterable[tuple[BoundTensor, Layout]], anywhere: Callable[[str], bool] = lambda name: False
) -> Bound:
    """Return the bound rule with factors split as the layouts of these operands split their dims.

    If several layouts split a factor, the first decides. `anywhere(name)` says whether the kernel of a factor accepts
    shards whose indices are not contiguous.

    >>> bound = bind(parse("m k, k n -> m n"), [(10, 6), (6, 8)])
    >>> layout = Layout.make((4,), ((Factor(2, ()), Factor(5, (0,))), (Factor(6, ()),)))
    >>> refine(bound, [(bound.inputs[0], layout)])
    m_0=2 m_1=5 k=6 n=8: m k, k n -> m n
    """
    splits: dict[int, tuple[int, ...]] = {}
    for tensor, layout in operands:
        for factors, dim in zip(tensor.dims, layout.dims, strict=True):
            if len(dim) > 1 and factors:
                found = _splits_of(bound, factors, [part.size for part in dim])
                if all(factor not in splits and _may_split(bound, factor, anywhere) for factor in found):
                    splits.update(found)
    return _split(bound, splits) if splits else bound


def _may_split(bound: Bound, factor: int, anywhere: Callable[[str], bool]) -> bool:
    name, _, kind, _ = bound.factors[factor]
    return kind is not FactorKind.REPLICATED and (kind is not FactorKind.KERNEL or anywhere(name))


def _splits_of(bound: Bound, factors: tuple[int, ...], parts: list[int]) -> dict[int, tuple[int, ...]]:
    """Return how to split the factors of a dim so that each part, a factor of its layout, is a product of factors.

    Factors of sizes 12 and 2, parts of sizes 4 and 6: the first factor is split into 4 and 3, since 6 = 3 * 2. Empty if
    there is nothing to split, or no such split: factors of sizes 4 and 6 do not fit parts of sizes 6 and 4.
    """
    sizes = [bound.factors[factor].size for factor in factors]
    if len(sizes) == 1:
        return {factors[0]: tuple(parts)}
    ends = sorted({*accumulate(sizes, mul), *accumulate(parts, mul)})
    if 0 in ends or any(end % start for start, end in pairwise([1, *ends])):
        return {}
    found: dict[int, tuple[int, ...]] = {}
    start = 1
    for factor, size in zip(factors, sizes, strict=True):
        inside = [start, *(end for end in ends if start < end < start * size), start * size]
        if len(inside) > 2:
            found[factor] = tuple(after // before for before, after in pairwise(inside))
        start *= size
    return found


def _split(bound: Bound, splits: dict[int, tuple[int, ...]]) -> Bound:
    factors: list[BoundFactor] = []
    renumbered: dict[int, tuple[int, ...]] = {}
    for index, factor in enumerate(bound.factors):
        sizes = splits.get(index, (factor.size,))
        renumbered[index] = tuple(range(len(factors), len(factors) + len(sizes)))
        if index not in splits:
            factors.append(factor)
        else:
            factors += [factor._replace(name=f"{factor.name}_{i}", size=size) for i, size in enumerate(sizes)]

    def expanded(dim: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new for old in dim for new in renumbered[old])

    def renamed(tensor: BoundTensor | None) -> BoundTensor | None:
        return tensor and BoundTensor(tensor.shape, tuple(map(expanded, tensor.dims)))

    def renamed_argument(argument: BoundArgument) -> BoundArgument:
        if argument is None or isinstance(argument, BoundTensor):
            return renamed(argument)
        return tuple(map(renamed, argument))

    return bound._replace(
        factors=tuple(factors),
        inputs=tuple(map(renamed_argument, bound.inputs)),
        outputs=tuple(map(renamed_argument, bound.outputs)),
        size_args=tuple(
            (name, tuple(expanded(entry) if isinstance(entry, tuple) else entry for entry in entries))
            for name, entries in bound.size_args
        ),
    )
