"""A call of an op that can be resized, split into pieces, and run on other data.

>>> call = ProbeCall(Recorded(torch.ops.aten.mm.default, (x, y), {}))    # shapes (5, 4) and (4, 3)
>>> call.dims()
[(0, 0, 5), (0, 1, 4), (1, 0, 4), (1, 1, 3)]
>>> call.select(((0, 1), (1, 0)), torch.tensor([0, 2]), ()).run()        # a product over two rows
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.ops import schema_of
from ..dispatch.arguments import Kwargs
from ..ops.schema import operands_of, tensor_arguments
from .checker import tensors_in
from .recording import Recorded

KINDS_OF_DATA = ("shuffled", "signs", "tails")

Dims = tuple[tuple[int, int], ...]
"""Dims that are split together: (operand, dim). All tensors of a list are one operand."""

Size = tuple[str, int | None]
"""An argument that contains the size of the dims that are split, and the index of the size if it is a list."""


class ProbeCall:
    """A call that can be resized and split: its operands by number, its other arguments by name."""

    def __init__(self, call: Recorded) -> None:
        names = [argument.name for argument in schema_of(call.func).arguments]
        self.func = call.func
        self.arguments: Kwargs = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        self.names = [operand.name for operand in operands_of(call.func)]

    def tensors(self, operand: int) -> list[Tensor]:
        """Return the tensors of an operand: one, those of a list, or none."""
        return tensors_in(self.arguments.get(self.names[operand]))

    def size(self, operand: int, dim: int) -> int | None:
        """Return the size of a dim; None if the tensors of a list differ in it."""
        sizes = {t.shape[dim] if dim < t.dim() else None for t in self.tensors(operand)}
        return sizes.pop() if len(sizes) == 1 else None

    def dims(self) -> list[tuple[int, int, int]]:
        """Return every dim that may be split: operand, dim, size."""
        found = []
        for operand in range(len(self.names)):
            ndim = min((t.dim() for t in self.tensors(operand)), default=0)
            found += [(operand, d, n) for d in range(ndim) if (n := self.size(operand, d))]
        return found

    def replaced(self, change: Callable[[int, Tensor], Tensor], sizes: Sequence[Size] = (), size: int = 0) -> ProbeCall:
        """Return the call with changed tensors, and another size in some arguments."""
        made = ProbeCall.__new__(ProbeCall)
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

    def select(self, dims: Dims, rows: Tensor, sizes: Sequence[Size]) -> ProbeCall:
        """Return the call on these rows of dims that are split together."""
        of = dict(dims)
        return self.replaced(
            lambda operand, t: t.index_select(of[operand], rows) if operand in of else t, sizes, len(rows)
        )

    def run(self) -> list[list[Tensor]] | None:
        """Run the op. Returns the tensors of each result, or of written arguments if it has none; None if it fails."""
        copied = self.replaced(lambda operand, t: t.clone())
        try:
            with torch.no_grad():
                result = self.func(**copied.arguments)
        except Exception:
            return None
        if result is None:
            result = [copied.arguments[a.name] for a in tensor_arguments(self.func) if a.write]
        results = [result] if isinstance(result, Tensor) or not isinstance(result, (tuple, list)) else list(result)
        if [str(r.type) for r in schema_of(self.func).returns] == ["List[Tensor]"]:
            results = [results]
        flat = [pytree.tree_leaves(value) for value in results]
        return flat if all(isinstance(t, Tensor) for tensors in flat for t in tensors) else None


def generator_of(*seed: object) -> torch.Generator:
    """Return a generator seeded by these values."""
    return torch.Generator().manual_seed(random.Random(repr(seed)).getrandbits(48))


def variants(call: ProbeCall, seed: int, alone: Collection[int] = ()) -> Iterator[ProbeCall]:
    """Yield the call unchanged, then with its data shuffled, from {-1, 0, 1}, and with heavy tails.

    The operands `alone` also get other data while all others keep theirs.
    """
    yield call
    for number, kind in enumerate(KINDS_OF_DATA * 2):
        yield with_other_data(call, kind, range(len(call.names)), generator_of(seed, kind, number))
    for kind in KINDS_OF_DATA if alone else ():
        yield with_other_data(call, kind, alone, generator_of(seed, kind))


def with_other_data(call: ProbeCall, kind: str, operands: Collection[int], generator: torch.Generator) -> ProbeCall:
    """Return the call with other data in some operands."""
    return call.replaced(lambda operand, t: _other_data(t, kind, generator) if operand in operands else t)


def _other_data(tensor: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    order = torch.randperm(tensor.numel(), generator=generator)
    if tensor.dtype is torch.bool and kind != "shuffled":
        rare = torch.rand(tensor.shape, generator=generator) < min(0.5, 1.5 / max(tensor.numel(), 1))
        return rare if kind == "tails" else ~rare
    if kind == "shuffled" or not tensor.is_floating_point():
        return tensor.flatten()[order].view(tensor.shape)  # most ops accept the same numbers in another order
    if kind == "signs":
        return torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.dtype)
    wide = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (wide * 10 ** (3 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))).to(tensor.dtype)
