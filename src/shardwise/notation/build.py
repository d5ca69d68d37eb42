"""Functions that write the text of a rule for given ranks, dim arguments and shapes.

>>> pointwise(2, "linear 0+1")
'b?.., b?.. -> b.. ; linear 0+1'
>>> replicated_dims("x", 3, [-1])
'x0 x1 [x2]'
>>> reduction(3, [1], keepdim=True, reduce="max")
'x0 x1 x2 -> x0 1 x2 ; monotone 0 ; reduce max'
>>> view_rule((24, 8), (4, 48))
'(a b) c -> a (b c) ; size=(a (b c))'
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .._torch.symbols import common_divisor, specialized
from .patterns import RuleError


def join(*parts: str) -> str:
    """Join the sides of a rule and its clauses; empty ones are left out."""
    return " ; ".join(filter(None, parts))


def kernel_clause(factors: Sequence[str]) -> str:
    """Return the clause that names these factors as handled by a kernel; empty without factors."""
    return f"kernel {', '.join(factors)}" if factors else ""


def pointwise(operands: int, *clauses: str) -> str:
    """Return the rule of an elementwise op whose operands broadcast against each other.

    >>> pointwise(2, "linear 0+1")
    'b?.., b?.. -> b.. ; linear 0+1'
    """
    return join(f"{', '.join(['b?..'] * operands)} -> b..", *clauses)


def normalized(ndim: int, dims: int | Sequence[int] | None) -> list[int]:
    """Return dims as sorted numbers >= 0; all dims for None; none for a 0-dim tensor, where PyTorch accepts dim 0."""
    if dims is None:
        return list(range(ndim))
    given = (dims,) if isinstance(dims, int) else dims
    return sorted({dim % ndim for dim in given}) if ndim else []


def dims_text(name: str, ndim: int, special: Mapping[int, str]) -> str:
    """Return the pattern x0 x1 ... with other texts for some dims; an empty text leaves the dim out.

    >>> dims_text("x", 3, {1: "k"})
    'x0 k x2'
    """
    return " ".join(text for i in range(ndim) if (text := special.get(i, f"{name}{i}")))


def replicated_dims(name: str, ndim: int, dims: int | Sequence[int] | None) -> str:
    """Return the pattern x0 x1 ... in which these dims must be replicated.

    >>> replicated_dims("x", 3, [-1])
    'x0 x1 [x2]'
    """
    name = name.removesuffix("..")
    return dims_text(name, ndim, {dim: f"[{name}{dim}]" for dim in normalized(ndim, dims)})


def reduction(
    ndim: int, dims: int | Sequence[int] | None, keepdim: bool = False, reduce: str = "sum", linear: bool = True
) -> str:
    """Return the rule of a reduction of one tensor over these dims; None or an empty list is all dims.

    With `linear`, a Partial operand of the same op stays Partial: a sum of sums, a maximum of maxima.

    >>> reduction(3, [1], keepdim=True, reduce="max")
    'x0 x1 x2 -> x0 1 x2 ; monotone 0 ; reduce max'
    """
    reduced = normalized(ndim, dims) or list(range(ndim))
    result = dims_text("x", ndim, dict.fromkeys(reduced, "1" if keepdim else ""))
    passing = {"sum": "linear 0", "avg": "linear 0", "max": "monotone 0", "min": "monotone 0"}.get(reduce, "")
    clause = "" if reduce == "sum" else f"reduce {reduce}"
    return join(f"{dims_text('x', ndim, {})} -> {result}".strip(), passing if linear else "", clause)


# ---- views ------------------------------------------------------------------------------------------------------


def view_rule(old: Sequence[int], new: Sequence[int], argument: str | None = "size") -> str:
    """Return the rule of reshaping `old` into `new`; `argument` is the op's argument with the new shape, if any.

    Both shapes are walked from the left. While the products of the sizes passed so far are equal, the greatest common
    divisor of the two dims is a factor of both. Otherwise the rest of the dim with the smaller product is a factor of
    that dim alone, which must be replicated.

    >>> view_rule((6, 4), (4, 6))
    '(a [b]) [c] -> (a [d]) [e] ; a=2 ; size=((a d) e)'
    """
    if math.prod(old) != math.prod(new):
        raise RuleError(
            f"{list(old)} cannot be viewed as {list(new)}: they have {math.prod(old)} and {math.prod(new)} elements",
            "pass shapes with the same number of elements",
        )
    walk = _Walk(old, new)
    if math.prod(old) == 0:
        walk.common_prefix()
    else:
        walk.run()
    order = dict.fromkeys(factor for dim in (*walk.left, *walk.right) for factor in dim)
    names = dict(zip(order, _names(), strict=False))
    marked = {factor: f"[{name}]" if factor in walk.replicated else name for factor, name in names.items()}
    left, right = (" ".join(_group([marked[f] for f in dim], "1") for dim in side) for side in (walk.left, walk.right))
    fixed = [f"{names[factor]}={specialized(walk.sizes[factor])}" for factor in walk.unsolvable(order)]
    entries = " ".join(_group([names[f] for f in dim], "1") for dim in walk.right)
    return join(f"{left} -> {right}".strip(), *fixed, f"{argument}=({entries})" if argument else "")


def _names() -> Iterator[str]:
    for suffix in itertools.chain([""], map(str, itertools.count(1))):
        yield from (letter + suffix for letter in string.ascii_lowercase)


class _Walk:
    """The state of `view_rule`: `left` and `right` collect the factors of the dims of the two shapes."""

    def __init__(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.old, self.new = old, new
        self.left: list[list[int]] = [[] for _ in old]
        self.right: list[list[int]] = [[] for _ in new]
        self.sizes: list[int] = []
        self.replicated: set[int] = set()

    def factor(self, size: int, *dims: list[int]) -> None:
        """Append a new factor to these dims. A factor of one dim alone must be replicated."""
        if len(dims) == 1:
            self.replicated.add(len(self.sizes))
        for dim in dims:
            dim.append(len(self.sizes))
        self.sizes.append(size)

    def run(self) -> None:
        """Find the factors of shapes with elements."""
        i = j = -1
        rest_old = rest_new = passed_old = passed_new = 1
        while True:
            # Dims of size 1 in the same place are one dim: it may be sharded, with one rank that holds it.
            while rest_old == rest_new == 1 and passed_old == passed_new and self._both_one(i + 1, j + 1):
                i, j = i + 1, j + 1
                self.factor(1, self.left[i], self.right[j])
            while rest_old == 1 and i + 1 < len(self.old):
                i, rest_old = i + 1, self.old[i + 1]
            while rest_new == 1 and j + 1 < len(self.new):
                j, rest_new = j + 1, self.new[j + 1]
            if rest_old == rest_new == 1:
                return
            common = common_divisor(rest_old, rest_new) if passed_old == passed_new else 1
            if common > 1:
                self.factor(common, self.left[i], self.right[j])
                rest_old, rest_new = rest_old // common, rest_new // common
                passed_old, passed_new = passed_old * common, passed_new * common
            elif passed_old <= passed_new and rest_old > 1:
                self.factor(rest_old, self.left[i])
                rest_old, passed_old = 1, passed_old * rest_old
            else:
                self.factor(rest_new, self.right[j])
                rest_new, passed_new = 1, passed_new * rest_new

    def _both_one(self, i: int, j: int) -> bool:
        return i < len(self.old) and j < len(self.new) and self.old[i] == self.new[j] == 1

    def common_prefix(self) -> None:
        """Find the factors of shapes without elements, whose products are 0: dims up to the first difference."""
        for d, (size_old, size_new) in enumerate(zip(self.old, self.new, strict=False)):
            if size_old != size_new:
                break
            self.factor(size_old, self.left[d], self.right[d])
        for side, shape in ((self.left, self.old), (self.right, self.new)):
            for dim, size in zip(side, shape, strict=True):
                if not dim and size != 1:
                    self.factor(size, dim)

    def unsolvable(self, order: Iterable[int]) -> list[int]:
        """Return factors whose sizes the rule must give, since they do not follow from the two shapes."""
        solved: set[int] = set()
        given: list[int] = []
        while len(solved) < len(self.sizes):
            unknown = [set(dim) - solved for dim in (*self.left, *self.right)]
            found = {factor for factors in unknown if len(factors) == 1 for factor in factors}
            if not found:
                found = {next(factor for factor in order if factor not in solved)}
                given += found
            solved |= found
        return given


def _group(names: Sequence[str], empty: str) -> str:
    return empty if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"
