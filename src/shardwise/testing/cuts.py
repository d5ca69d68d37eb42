"""Which dims of an op's operands can be cut together, found by trying: cut them, run the op, put the results together.

>>> found_factors([call])          # of aten::mm
[Cut(dims=((0, 0),), ways=(('concat', 0),), sizes=()),
 Cut(dims=((0, 1), (1, 0)), ways=(('sum', 0),), sizes=()),
 Cut(dims=((1, 1),), ways=(('concat', 1),), sizes=())]

Agreement on one input says little. What keeps false rules out:

- dims are first made longer, to a size that no other dim has, by repeating slices of them in random order: a dim of
  size 2 cut to 1 would broadcast, and equal sizes hide which dim is which;
- cuts are uneven, in two and in three, with pieces of one row and of several: averages fail;
- data is shuffled, taken from {-1, 0, 1}, and drawn with heavy tails: maxima that saturate and lucky minima fail;
- a result counts as the same for all pieces only if it does not change with the data that was cut;
- all factors of a call are tried again on a second shape, at which all of them have new sizes;
- results without elements prove nothing, and where several ways fit (a result of zeros) none is believed.

Some ops crash on cut inputs: this is for child processes.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import pytree
from ..notation.schema import operands_of, tensor_arguments
from .calls import Recorded

MOST_SETS = 400  # sets of dims that are tried for one call
SIZES = (7, 6, 8, 9, 10, 11, 5, 12, 13, 14)
"""Sizes that a dim is brought to before it is cut; the first ones that no other dim has."""

KINDS_OF_DATA = ("shuffled", "signs", "tails")
REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
Way = tuple[str, int]
"""How a result comes from its pieces: `concat` along a dim, `sum`, `max`, `min`, or the `same` in all."""

Dims = tuple[tuple[int, int], ...]
"""Dims that are cut together: (operand, dim). All tensors of a list are one operand."""

Size = tuple[str, int | None]
"""An argument that holds the size of what is cut, and the place in it where it is a list."""


class Cut(NamedTuple):
    """Dims that can be cut together, the way to each result, and arguments that hold their size."""

    dims: Dims
    ways: tuple[Way, ...]
    sizes: tuple[Size, ...] = ()


class Setup:
    """A call that can be made longer and cut: its operands by number, its other arguments by name."""

    def __init__(self, call: Recorded) -> None:
        names = [argument.name for argument in call.func._schema.arguments]
        self.func = call.func
        self.arguments: dict[str, Any] = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        self.names = [operand.name for operand in operands_of(call.func)]

    def tensors(self, operand: int) -> list[Tensor]:
        """The tensors of an operand: one, those of a list, or none."""
        value = self.arguments.get(self.names[operand])
        return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]

    def size(self, operand: int, dim: int) -> int | None:
        """The size of a dim; None where the tensors of a list differ in it."""
        sizes = {t.shape[dim] if dim < t.dim() else None for t in self.tensors(operand)}
        return sizes.pop() if len(sizes) == 1 else None

    def dims(self) -> list[tuple[int, int, int]]:
        """Every dim that may be cut: operand, dim, size."""
        found = []
        for operand in range(len(self.names)):
            ndim = min((t.dim() for t in self.tensors(operand)), default=0)
            found += [(operand, d, n) for d in range(ndim) if (n := self.size(operand, d))]
        return found

    def mapped(self, change: Callable[[int, Tensor], Tensor], sizes: Sequence[Size] = (), size: int = 0) -> Setup:
        """The same call with other tensors, and another size in some arguments."""
        made = Setup.__new__(Setup)
        made.func, made.names, made.arguments = self.func, self.names, dict(self.arguments)
        for operand, name in enumerate(self.names):
            if name in made.arguments:
                made.arguments[name] = pytree.tree_map_only(
                    Tensor, functools.partial(change, operand), made.arguments[name]
                )
        for name, index in sizes:
            value = made.arguments[name]
            made.arguments[name] = size if index is None else [*value[:index], size, *value[index + 1 :]]
        return made

    def taken(self, dims: Dims, rows: Tensor, sizes: Sequence[Size]) -> Setup:
        """These rows of the dims that are cut together."""
        of = dict(dims)
        return self.mapped(
            lambda operand, t: t.index_select(of[operand], rows) if operand in of else t, sizes, len(rows)
        )

    def run(self) -> list[list[Tensor]] | None:
        """The results, a list for each; what an op writes counts where it returns nothing. None if it fails."""
        copied = self.mapped(lambda operand, t: t.clone())
        try:
            with torch.no_grad():
                result = self.func(**copied.arguments)
        except Exception:
            return None
        if result is None:
            result = [copied.arguments[a.name] for a in tensor_arguments(self.func) if a.write]
        results = [result] if isinstance(result, Tensor) or not isinstance(result, (tuple, list)) else list(result)
        if [str(r.type) for r in self.func._schema.returns] == ["List[Tensor]"]:
            results = [results]
        flat = [pytree.tree_leaves(value) for value in results]
        return flat if all(isinstance(t, Tensor) for tensors in flat for t in tensors) else None


# ---- data -----------------------------------------------------------------------------------------------------------


def _generator(*seed: Any) -> torch.Generator:
    return torch.Generator().manual_seed(random.Random(repr(seed)).getrandbits(48))


def variants(setup: Setup, seed: int, alone: Collection[int] = ()) -> Iterator[Setup]:
    """The call as it is, with its data shuffled, from {-1, 0, 1}, and with heavy tails.

    `alone`: operands that also get other data while the rest keeps the sample's.
    """
    yield setup
    for number, kind in enumerate(KINDS_OF_DATA * 2):
        yield _redrawn(setup, kind, range(len(setup.names)), _generator(seed, kind, number))
    for kind in KINDS_OF_DATA if alone else ():
        yield _redrawn(setup, kind, alone, _generator(seed, kind))


def _redrawn(setup: Setup, kind: str, operands: Collection[int], generator: torch.Generator) -> Setup:
    """The call with other data in some operands."""
    return setup.mapped(lambda operand, t: _fresh(t, kind, generator) if operand in operands else t)


def _fresh(tensor: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    order = torch.randperm(tensor.numel(), generator=generator)
    if tensor.dtype is torch.bool and kind != "shuffled":
        rare = torch.rand(tensor.shape, generator=generator) < min(0.5, 1.5 / max(tensor.numel(), 1))
        return rare if kind == "tails" else ~rare
    if kind == "shuffled" or not tensor.is_floating_point():
        return tensor.flatten()[order].view(tensor.shape)  # the same numbers are as legal as before, for most ops
    if kind == "signs":
        return torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.dtype)
    wide = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (wide * 10 ** (3 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))).to(tensor.dtype)


# ---- one call -------------------------------------------------------------------------------------------------------


def factors_of(setup: Setup, seed: int = 0, gentle: bool = False) -> list[Cut] | None:
    """What can be cut in one call, each dim at most once; None if the call tells nothing.

    `gentle`: with the sample's own numbers alone, for ops that crash on others.
    """
    results = setup.run()
    if not results or not any(t.numel() for tensors in results for t in tensors):
        return None
    found: list[Cut] = []
    unread: list[tuple[int, int]] = []
    for dims in itertools.islice(_sets(setup), MOST_SETS):
        if any(not set(dims).isdisjoint(cut.dims) for cut in found) or not set(dims).isdisjoint(unread):
            continue
        for sizes in _size_arguments(setup, dims):
            ways = _ways(setup, dims, sizes, seed, gentle)
            if ways and all(way == ("same", 0) for way in ways):
                unread += dims  # nothing depends on it: cut alone it is of no use
                break
            if ways:
                found.append(Cut(dims, ways, sizes))
                break
    found = [_with_unread(setup, cut, unread, seed, gentle) for cut in found]
    return _on_second_shape(setup, found, seed, gentle)


def _with_unread(setup: Setup, cut: Cut, unread: Sequence[tuple[int, int]], seed: int, gentle: bool) -> Cut:
    """The cut with dims of operands that are not read in this call: in another call they may be."""
    size, first = setup.size(*cut.dims[0]), cut.dims[0][1]
    for operand, dim in sorted(unread, key=lambda place: (place[0], abs(place[1] - first))):
        if operand not in dict(cut.dims) and setup.size(operand, dim) == size:
            dims = tuple(sorted((*cut.dims, (operand, dim))))
            if _ways(setup, dims, cut.sizes, seed, gentle) == cut.ways:
                cut = cut._replace(dims=dims)
    return cut


def _sets(setup: Setup) -> Iterator[Dims]:
    """Sets of dims of one size, at most one of each operand, small sets first."""
    dims = setup.dims()
    sets = []
    for size in sorted({n for _, _, n in dims}):
        choices: dict[int, list[tuple[int, int] | None]] = {}
        for operand, dim, n in dims:
            if n == size:
                choices.setdefault(operand, [None]).append((operand, dim))
        some = itertools.islice(itertools.product(*choices.values()), 8 * MOST_SETS)
        sets += [tuple(place for place in chosen if place) for chosen in some if any(chosen)]
    yield from sorted(sets, key=lambda places: (len(places), places))


def _size_arguments(setup: Setup, dims: Dims) -> Iterator[tuple[Size, ...]]:
    """No argument, or one or two that hold this size; those alone that may hold another on each simulated rank."""
    size = setup.size(*dims[0])
    places: list[Size] = []
    sized = re.findall(r"SymInt\S* (\w+)", str(setup.func._schema))
    for name, value in setup.arguments.items():
        if name not in sized or size == 1:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value == size:
            places.append((name, None))
        elif isinstance(value, (list, tuple)):
            places += [(name, i) for i, element in enumerate(value) if type(element) is int and element == size]
    for count in range(3):
        yield from itertools.combinations(places, count)


def _new_size(setup: Setup, taken: Sequence[int] = ()) -> int:
    used = {n for _, _, n in setup.dims()} | set(taken)
    return next(n for n in (*SIZES, *range(15, 99)) if n not in used)


def _longer(setup: Setup, dims: Dims, sizes: Sequence[Size], seed: int, taken: Sequence[int] = ()) -> Setup:
    generator = _generator(seed, "rows", dims)
    size = setup.size(*dims[0])
    assert size, "dims are cut that have a size"
    rows = torch.randint(size, (_new_size(setup, taken),), generator=generator)
    return setup.taken(dims, rows, sizes)


def _ways(setup: Setup, dims: Dims, sizes: Sequence[Size], seed: int, gentle: bool) -> tuple[Way, ...]:
    """The way that puts each result together from pieces, for all data and cuts; empty if some result has none."""
    longer = _longer(setup, dims, sizes, seed)
    if longer.run() is None:
        return ()
    ways = _ways_of(longer, dims, sizes, seed, gentle)
    # A dim of size 1 may be no dim at all but a number in brackets: only a result that grows with it shows that it is.
    return ways if setup.size(*dims[0]) != 1 or any(way == "concat" for way, _ in ways) else ()


def _ways_of(setup: Setup, dims: Dims, sizes: Sequence[Size], seed: int, gentle: bool) -> tuple[Way, ...]:
    left: list[set[Way]] | None = None
    size = setup.size(*dims[0])
    assert size, "dims are cut that have a size"
    for data in [setup] if gentle else variants(setup, seed, dict(dims)):
        whole = data.run()
        if whole is None:
            continue  # data that the op refuses
        for bounds in ([0, size // 2, size], [0, 1, size], [0, 1, 4, size], [0, size - 2, size]):
            rows = [torch.arange(start, stop) for start, stop in itertools.pairwise(bounds)]
            pieces = [data.taken(dims, part, sizes).run() for part in rows]
            ways = _ways_together(whole, pieces)
            left = ways if left is None else [old & new for old, new in zip(left, ways, strict=True)]
            if not all(left):
                return ()
    chosen = [_believed(ways, setup, dims, index, seed) for index, ways in enumerate(left or [])]
    return tuple(way for way in chosen if way) if all(chosen) else ()


def _believed(ways: set[Way], setup: Setup, dims: Dims, result: int, seed: int) -> Way | None:
    """The one way that is to be believed."""
    joined = [way for way in ways if way[0] == "concat"]
    if joined:
        return joined[0] if len(joined) == 1 else None
    if ("same", 0) in ways:
        return ("same", 0) if _is_blind(setup, dims, result, seed) and _copes_with_nothing(setup, dims) else None
    return next(iter(ways)) if len(ways) == 1 else None


def _is_blind(setup: Setup, dims: Dims, result: int, seed: int) -> bool:
    """Whether a result does not depend on the data that is cut."""
    whole, cut = setup.run(), {operand for operand, _ in dims}
    for number, kind in enumerate(KINDS_OF_DATA * 3):
        other = _redrawn(setup, kind, cut, _generator(seed, kind, number)).run()
        if other is None or whole is None or not same_results(whole[result], other[result]):
            return False
    return True


def _copes_with_nothing(setup: Setup, dims: Dims) -> bool:
    """Whether the op also runs on no rows at all: a rank without data has to give what is the same on all ranks."""
    return setup.taken(dims, torch.arange(0), ()).run() is not None


def _on_second_shape(setup: Setup, found: list[Cut], seed: int, gentle: bool) -> list[Cut]:
    """Those cuts that also hold when all of them have other sizes; all sizes then differ."""
    longer = setup
    taken: list[int] = []
    for cut in found:
        longer = _longer(longer, cut.dims, cut.sizes, seed + 1, taken)
        taken.append(longer.size(*cut.dims[0]) or 0)
    if longer.run() is None:
        return found  # data that belongs together in a way that longer dims break: each was tried by itself
    return [cut for cut in found if _ways_of(longer, cut.dims, cut.sizes, seed + 1, gentle) == cut.ways]


# ---- comparing ------------------------------------------------------------------------------------------------------


def _ways_together(whole: list[list[Tensor]], pieces: Sequence[list[list[Tensor]] | None]) -> list[set[Way]]:
    """For each result all ways that give it from its pieces."""
    ways: list[set[Way]] = []
    for index, tensors in enumerate(whole):
        parts = [piece[index] if piece is not None and index < len(piece) else None for piece in pieces]
        fitting = tensors and all(part is not None and len(part) == len(tensors) for part in parts)
        each = [
            set(_ways_of_tensor(tensor, [part[i] for part in parts if part is not None]))
            for i, tensor in enumerate(tensors if fitting else ())
        ]
        ways.append(set.intersection(*each) if each else set())
    return ways


def _ways_of_tensor(whole: Tensor, pieces: Sequence[Tensor]) -> Iterator[Way]:
    if all(_same(piece, whole) for piece in pieces):
        yield "same", 0
    if any(piece.dim() != whole.dim() or piece.dtype != whole.dtype for piece in pieces):
        return
    for dim in range(whole.dim()):
        others = {(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces}
        if len(others) == 1 and whole.shape[dim] and _same(torch.cat(list(pieces), dim), whole):
            yield "concat", dim
    if any(piece.shape != whole.shape for piece in pieces) or not whole.numel():
        return
    truth = whole.dtype is torch.bool
    stacked = torch.stack([piece.to(torch.uint8) if truth else piece for piece in pieces])
    for name, reduce in REDUCTIONS.items():
        if (name == "sum" and truth) or (name != "sum" and whole.is_complex()):
            continue
        try:
            reduced = reduce(stacked, 0).to(whole.dtype)
        except NotImplementedError:
            continue  # of unsigned integers, for one
        if _same(reduced, whole):
            yield name, 0


def same_results(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors agree, up to the order of sums."""
    return len(ones) == len(others) and all(_same(one, other) for one, other in zip(ones, others, strict=True))


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    exact = one.dtype in (torch.float64, torch.complex128)
    rtol, atol = (1e-6, 1e-9) if exact else (1e-4, 1e-5)
    scale = float(other[other.isfinite()].abs().amax()) if other.isfinite().any() else 1.0
    return torch.allclose(one, other, rtol=rtol, atol=atol * max(1.0, scale), equal_nan=True)
