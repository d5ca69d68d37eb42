"""Kernels and their communication requests: pure data, so that one driver serves processes and simulated ranks.

`pieces` are the ranks that share a sharded factor, in the order of their shards: piece 0 holds its beginning.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._torch.ops import OpOverload, schema_of
from ..comm.transport import identity
from ..sharding.layout import Coordinate, Factor, Layout, Run, factor_range
from .call import Kwargs


class FactorShard(NamedTuple):
    """This rank's shard of a factor: the global size, the bounds of every piece, and which piece is this rank's.

    `counts` are the sizes of the mesh axes that shard it, major to minor.
    """

    size: int
    bounds: tuple[Run, ...]
    piece: int
    counts: tuple[int, ...] = ()

    def of(self, size: int) -> FactorShard:
        """Return this rank's shard of a dim of another size, of another operand or a result, over the same axes."""
        axes = tuple(range(len(self.counts)))
        places = itertools.product(*map(range, self.counts))
        bounds = tuple(factor_range(self.counts, Factor(size, axes), place) for place in places)
        return FactorShard(size, bounds, self.piece, self.counts)

    @property
    def start(self) -> int:
        """The global index of this rank's first element."""
        return self.bounds[self.piece][0]

    @property
    def stop(self) -> int:
        """The global index after this rank's last element."""
        return self.bounds[self.piece][1]

    @property
    def held(self) -> int:
        """The number of indices of the factor that this rank holds."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call on one rank, as kernels and local implementations see it.

    `dims` says for each tensor operand, `out_dims` for each result, which dim has the sharded factor (None: none has).
    `shapes` and `dtypes` are those of the global results, `layouts` their layouts, `given` the layouts of the operands
    (which have their global shapes), `at` is this rank's coordinate.
    """

    func: OpOverload
    arguments: Kwargs
    dims: tuple[int | None, ...]
    out_dims: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    layouts: tuple[Layout, ...]
    at: Coordinate
    given: tuple[Layout, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return a local argument by its name in the schema."""
        return self.arguments[name]

    @property
    def sharded_dim(self) -> int:
        """The dim that has the sharded factor, in the first operand that has it."""
        return next(dim for dim in self.dims if dim is not None)

    def local_shape(self, result: int = 0) -> tuple[int, ...]:
        """Return the local shape of a result."""
        return self.layouts[result].local_shape(self.at)

    def zeros(self, like: Tensor, result: int = 0) -> Tensor:
        """Return this rank's shard of a result, filled with zeros, on the device of `like`."""
        return like.new_zeros(self.local_shape(result), dtype=self.dtypes[result])

    def run(self, /, **changed: object) -> Any:
        """Run the op itself on the local arguments, some of them replaced by `changed`."""
        arguments = {**self.arguments, **changed}
        positional = [arguments[a.name] for a in schema_of(self.func).arguments if not a.kwarg_only]
        named = {a.name: arguments[a.name] for a in schema_of(self.func).arguments if a.kwarg_only}
        return self.func(*positional, **named)


class Gather(NamedTuple):
    """Request every piece's tensor (all of one shape), as one tensor with a new first dim."""

    tensor: Tensor


class Reduce(NamedTuple):
    """Request the reduction of every piece's tensor (all of one shape)."""

    tensor: Tensor
    op: str = "sum"


Rows = Run | Sequence[Run]
"""Rows of a dim: those from a start to a stop, or several such runs, one after the other."""


def clipped(run: Run, size: int) -> Run:
    """Return the rows of a run that a dim of this size has; `(0, 0)` if it has none."""
    low, high = (min(max(edge, 0), size) for edge in run)
    return (low, high) if high > low else (0, 0)


class Fetch(NamedTuple):
    """Request rows of the global tensor: piece i gets the rows `wanted[i]` along `dim`.

    `held[i]` are the rows that piece i has; all pieces give the same two lists. Rows that no piece holds are zero.
    """

    tensor: Tensor
    dim: int
    held: Sequence[Rows]
    wanted: Sequence[Rows]


class Return(NamedTuple):
    """The inverse of `Fetch`: piece i returns the rows `computed[i]`; each owner gets the sum over its rows."""

    tensor: Tensor
    dim: int
    held: Sequence[Rows]
    computed: Sequence[Rows]


class Rotate(NamedTuple):
    """Start to send a tensor to the next piece, the last to the first; the answer is what the previous piece sends.

    Piece i sends `rows[i]` rows along dim 0; all pieces give the same list. The answer may be read after `Arrive`, and
    the tensor that is sent may not be written before.
    """

    tensor: Tensor
    rows: Sequence[int]


class Arrive(NamedTuple):
    """Wait for the tensor that `Rotate` answered."""

    tensor: Tensor


Request = Gather | Reduce | Fetch | Return | Rotate | Arrive
LocalResult = Tensor | Sequence["LocalResult"] | Mapping[str, "LocalResult"] | int | None
"""What an op returns on one rank. A kernel for lists of tensors may return new values of arguments by name."""
T = TypeVar("T")
Steps = Generator[Request, Tensor, T]
"""Code that communicates: a generator that yields requests, is sent their answers, and returns a result."""
KernelRun = Steps[LocalResult]


@dataclass(frozen=True)
class Kernel:
    """A kernel and its cost.

    `run(call, shard)` is the generator: `call` holds the local arguments, `shard` says which indices of the factor they
    cover. It returns the local shards of the op's results. `rounds` is the number of its collectives, `traffic` the
    bytes it receives as a multiple of the bytes of its local outputs.

    A `joint` kernel merges results of ranks in any order, so several of its factors may be sharded at once: `shard`
    then counts the elements of all of them together, and the order of its pieces means nothing. A kernel that works
    `anywhere` does not ask which elements a rank holds, so they need not be adjacent.
    """

    run: Callable[..., KernelRun]
    rounds: int = 1
    traffic: float = 1.0
    joint: bool = False
    anywhere: bool = False


def without_communication(
    local: Callable[[LocalCall, FactorShard], LocalResult],
) -> Callable[[LocalCall, FactorShard], KernelRun]:
    """Return a kernel from a function that needs no communication."""

    @functools.wraps(local)
    def run(call: LocalCall, shard: FactorShard) -> KernelRun:
        return local(call, shard)
        yield  # makes this a generator, as kernels are

    return run


def no_summand(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what a rank adds to a sum that it does not contribute to: zeros, -0.0 for floats, which change no sign."""
    return like.new_full(shape, identity(like.dtype, "sum"))
