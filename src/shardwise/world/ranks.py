"""RankTensor: the local tensors of all ranks, as one tensor on which any op runs on every rank.

>>> x = RankTensor([torch.ones(2), torch.zeros(2)])
>>> (x + 1).shards
(tensor([2., 2.]), tensor([1., 1.]))

It is what `to_local()` gives in a simulated world, so code written for one rank's local tensor runs
unchanged, for all ranks in lockstep. Autograd works on the RankTensor itself; the shards live below it. Values
that leave the tensors (`item()`, `bool()`, `tolist()`) must be the same on all ranks: one program cannot take
two branches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from .._torch.modes import TorchDispatchMode
from ..errors import WorldError
from .mapping import Op, agreed, describe, generator_for, same
from .rank_int import rank_int, rank_stride, values_of
from .registry import current_world

__all__ = ["RankTensor", "common", "implements", "map_ranks", "rank_factories", "replicate", "wrap"]

_ops: dict[Any, Op] = {}
_implementations: dict[Any, Callable[..., Any]] = {}


def implements(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function stand for ops that are not simply mapped over the ranks. It gets the op's arguments."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        _implementations.update(dict.fromkeys(funcs, implementation))
        return implementation

    return register


class RankTensor(torch.Tensor):
    """One local tensor per rank, `shards[rank]`: of any sizes, but of one dtype, device and ndim."""

    __slots__ = ("shards",)
    shards: tuple[torch.Tensor, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shards: Iterable[torch.Tensor], *, requires_grad: bool = False) -> RankTensor:
        shards = tuple(s.detach() if s.requires_grad else s for s in shards)
        _check_shards(shards)
        out = wrap(shards)
        out.requires_grad = requires_grad
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1 and not all(issubclass(t, RankTensor) for t in types):
            return NotImplemented  # another subclass holds RankTensors: it goes first
        implementation = _implementations.get(func)
        if implementation is not None:
            return implementation(*args, **(kwargs or {}))
        op = _ops.get(func)
        if op is None:
            op = _ops[func] = describe(func)
        if op.writes:
            return _map_writing(op, args, kwargs or {})
        results = _map(op, args, kwargs)
        return _wrap_view(results, args) if op.view else _collect(results, op.name)

    # Values that leave the tensor.
    def tolist(self) -> Any:
        return common(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        # A copy: writing into one rank's memory would part the ranks.
        return common(self.detach() if force else self).numpy(force=force).copy()

    def __format__(self, spec: str) -> str:
        if self.dim() == 0 and (spec or same(self.shards)):
            return format(self.item(), spec)
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        n, shards = len(self.shards), self.shards
        suffix = ""
        if self.grad_fn is not None:
            suffix = f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            suffix = ", requires_grad=True"
        if same(shards):
            return f"RankTensor({shards[0]!r}, same on all {n} ranks{suffix})"
        shown = range(n) if n <= 8 else [*range(4), *range(n - 2, n)]
        lines = [f"  rank {rank}: " + repr(shards[rank]).replace("\n", "\n  ") for rank in shown]
        if len(lines) < n:
            lines.insert(4, f"  ... {n - len(lines)} more ranks")
        return "RankTensor(\n" + "\n".join(lines) + suffix + "\n)"

    # Copies.
    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (self.shards, self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaves, tensors that were not computed, can be deep-copied: detach() first")
        out = _rebuild(copy.deepcopy(self.shards, memo), self.requires_grad, isinstance(self, torch.nn.Parameter))
        memo[id(self)] = out
        out.grad = copy.deepcopy(self.grad, memo)
        return out

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, RankTensor):
            raise WorldError("`.data` of a RankTensor set to a plain tensor", "set it to `replicate(tensor)`")
        _set_metadata(self, other)
        self.shards = other.shards

    def backward(self, *args: Any, **kwargs: Any) -> None:
        # Some formulas make new tensors by size alone.
        with rank_factories():
            super().backward(*args, **kwargs)

    # Memory that a RankTensor does not have: its ranks have it.
    def _no_memory(self, *_args: object, **_kwargs: object) -> Any:
        raise WorldError("a RankTensor has no memory of its own", "use the tensors in `x.shards`")

    __dlpack__ = __dlpack_device__ = apply_ = map_ = map2_ = share_memory_ = _no_memory
    untyped_storage = _no_memory

    def data_ptr(self) -> int:
        """None, as for every wrapper: code that copies tensors asks, and then goes through ops."""
        return 0


def _check_shards(shards: Sequence[torch.Tensor]) -> None:
    if not shards:
        raise WorldError("a RankTensor of no ranks", "give one tensor per rank")
    if any(isinstance(s, RankTensor) for s in shards):
        raise WorldError("a RankTensor inside a RankTensor", "give one plain tensor per rank")
    for what in ("ndim", "dtype", "device"):
        found = [getattr(s, what) for s in shards]
        for rank, value in enumerate(found):
            if value != found[0]:
                raise WorldError(
                    f"rank {rank}'s tensor has {what} {value}, rank 0's has {found[0]}",
                    "the local tensors of one RankTensor may differ in sizes and values only",
                )


def _rebuild(shards: tuple[torch.Tensor, ...], requires_grad: bool, is_parameter: bool) -> RankTensor:
    out: Any = RankTensor(shards, requires_grad=requires_grad)
    if is_parameter:
        out = torch.nn.Parameter(out, requires_grad)
    return out


torch.serialization.add_safe_globals([_rebuild])


# Wrapping ----------------------------------------------------------------------------------------------

_make = torch.Tensor._make_wrapper_subclass
_shape_of = attrgetter("shape")
_stride_of = torch.Tensor.stride


def wrap(shards: tuple[torch.Tensor, ...]) -> RankTensor:
    """The RankTensor of these shards, unchecked. Sizes and strides that differ become per-rank integers."""
    first = shards[0]
    n = len(shards)
    shapes = list(map(_shape_of, shards))
    strides = list(map(_stride_of, shards))
    shape: Any = shapes[0]
    stride: Any = strides[0]
    if shapes.count(shape) != n or strides.count(stride) != n:
        _check_shards(shards)
        sizes, steps = list(zip(*shapes, strict=True)), list(zip(*strides, strict=True))
        shape = list(map(rank_int, sizes))
        stride = list(map(_step, sizes, steps))
    offset = first.storage_offset()
    if offset and all(s.storage_offset() == offset for s in shards):
        out = _make(RankTensor, shape, stride, offset, dtype=first.dtype, device=first.device)
    else:  # where ranks differ, each shard is taken to start its own memory: see `_as_strided`
        out = _make(RankTensor, shape, stride, dtype=first.dtype, device=first.device)
    out.shards = shards
    return out


def _step(sizes: tuple[int, ...], steps: tuple[int, ...]) -> int | torch.SymInt:
    """The stride of one dim. Where a rank has one row or none it says nothing, and must not look different."""
    telling = [step for size, step in zip(sizes, steps, strict=True) if size > 1]
    if telling and all(step == telling[0] for step in telling):
        return telling[0]
    return rank_stride(steps)


def _wrap_view(results: list[Any], args: Sequence[Any]) -> Any:
    """Wrap an op's results that are views of its inputs."""
    source = args[0]
    if torch.is_inference_mode_enabled() and isinstance(source, torch.Tensor) and not source.is_inference():
        # A view shares its base's version counter, which an inference tensor does not have.
        with torch.inference_mode(False):
            return _collect(results, "view")
    return _collect(results, "view")


def _collect(results: Sequence[Any], name: str) -> Any:
    """Turn one result per rank into one result: tensors side by side, other values if all ranks agree."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return wrap(tuple(results))
    if first is None:
        return None
    if isinstance(first, (tuple, list)):
        agreed([len(result) for result in results], f"the number of results of {name}")
        return type(first)(_collect(column, name) for column in zip(*results, strict=True))
    return agreed(results, name)


def _set_metadata(target: RankTensor, source: RankTensor) -> None:
    """Give a wrapper another's sizes, strides, dtype and device."""
    torch.Tensor.data.__set__(target, source)  # type: ignore[attr-defined]


# Mapping -----------------------------------------------------------------------------------------------

# Most arguments are one of these, the same for all ranks.
_SHARED = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def _column(value: Any) -> Sequence[Any] | None:
    """What each rank sees of an argument, or None if all see the argument itself."""
    if isinstance(value, RankTensor):
        return value.shards
    if isinstance(value, (list, tuple)):
        columns = [_column(item) for item in value]
        lengths = {len(c) for c in columns if c is not None}
        if not lengths:
            return None
        n = _one_length(lengths)
        filled = (repeat(v, n) if c is None else c for v, c in zip(value, columns, strict=True))
        return list(zip(*filled, strict=True))
    return values_of(value)


def _one_length(lengths: set[int]) -> int:
    if len(lengths) > 1:
        raise WorldError(
            f"tensors of {' and '.join(map(str, sorted(lengths)))} ranks meet in one op",
            "use tensors of one simulated world together",
        )
    return lengths.pop()


def _map(op: Op, args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    """Run an op on every rank: the hot loop. No rank's call depends on another's."""
    columns: list[Any] = []
    n = 0
    for value in args:
        if type(value) is RankTensor:
            column: Any = value.shards
        elif type(value) in _SHARED:
            columns.append(repeat(value))
            continue
        else:
            column = _column(value)
            if column is None:
                columns.append(repeat(value))
                continue
        if n != len(column):
            n = _one_length({n or len(column), len(column)})
        columns.append(column)
    if op.random or (kwargs and not _SHARED.issuperset(map(type, kwargs.values()))):
        return _map_named(op, columns, kwargs or {}, n)
    call = partial(op.call, **kwargs) if kwargs else op.call
    return list(map(call, *columns))


def _map_named(op: Op, columns: list[Any], kwargs: dict[str, Any], n: int) -> list[Any]:
    """As `_map`, with per-rank arguments passed by name."""
    named = {name: _column(value) for name, value in kwargs.items()}
    n = _one_length({len(c) for c in named.values() if c is not None} | ({n} if n else set()))
    calls = [
        (row, {name: kwargs[name] if c is None else c[rank] for name, c in named.items()})
        for rank, *row in zip(range(n), *columns, strict=False)
    ]
    if op.random:
        return _draw(op, calls)
    return [op.call(*row, **by_name) for row, by_name in calls]


def _draw(op: Op, calls: list[tuple[list[Any], dict[str, Any]]]) -> list[Any]:
    """Run a random op on every rank as if each were a process with the same seed: all draw from one state.

    Rank 0 draws last, so the generator is left where rank 0, which holds the largest piece, leaves it.
    """
    row, by_name = calls[0]
    arguments = [*row, *by_name.values()]
    devices = (a.device for a in _flat(arguments) if isinstance(a, torch.Tensor))
    device = next(devices, by_name.get("device") or torch.device("cpu"))
    generator = generator_for(arguments, device)
    state = generator.get_state()
    results = []
    for row, by_name in reversed(calls):
        generator.set_state(state)
        results.append(op.call(*row, **by_name))
    return results[::-1]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _map_writing(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes to its arguments: into the memory of every shard, returning the same objects."""
    originals = [args[i] if i < len(args) else kwargs.get(name) for i, name in op.writes]
    targets = [t for t in _flat(originals) if isinstance(t, torch.Tensor)]
    plain = [t for t in targets if not isinstance(t, RankTensor)]
    copies: dict[int, RankTensor] = {}
    if plain:
        n = next(len(c) for c in map(_column, (*args, *kwargs.values())) if c is not None)
        copies = {id(t): replicate(t, n) for t in plain}
        args = [_exchange(value, copies) for value in args]
        kwargs = {name: _exchange(value, copies) for name, value in kwargs.items()}
    if op.resizes:
        for t in targets:
            if isinstance(t, RankTensor):  # shards may be shared with a detached twin, which keeps its sizes
                t.shards = tuple(s.detach() for s in t.shards)
    results = _map(op, args, kwargs)
    for t in plain:
        _write_back(op, t, copies[id(t)])
    if op.resizes:
        for t in targets:
            if isinstance(t, RankTensor):
                _set_metadata(t, wrap(t.shards))
    if len(op.returns) == 1 and op.returns[0] is not None:
        return originals[op.writes.index(op.returns[0])]
    collected = _collect(results, op.name)
    if not any(op.returns):
        return collected
    return tuple(
        c if place is None else originals[op.writes.index(place)]
        for c, place in zip(collected, op.returns, strict=True)
    )


def _exchange(value: Any, copies: dict[int, RankTensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_exchange(item, copies) for item in value]
    return copies.get(id(value), value)


def _write_back(op: Op, target: torch.Tensor, copies: RankTensor) -> None:
    """Put into a plain tensor, which all ranks share, what every rank wrote into its own copy of it."""
    if not same(copies.shards):
        raise WorldError(
            f"{op.name} would write different values of each rank into one plain tensor",
            "make it per-rank first with `replicate(tensor)`",
        )
    value = copies.shards[0]
    if target.shape != value.shape:
        target.resize_(value.shape)
    target.copy_(value)


# Ops that are not simply mapped ------------------------------------------------------------------------

_aten = torch.ops.aten


@implements(_aten.detach.default, _aten.alias.default)
def _alias(x: RankTensor) -> Any:
    return _wrap_view(list(x.shards), (x,))  # the very same shards: they carry no autograd state to part with


@implements(_aten.as_strided.default)
def _as_strided(x: RankTensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """An offset counts from where the tensor says it starts; each shard starts at an offset of its own."""
    if storage_offset is not None:
        starts: Any = [s.storage_offset() for s in x.shards]
        storage_offset = rank_int(starts) + (storage_offset - x.storage_offset())
    op = _ops.setdefault(_aten.as_strided.default, describe(_aten.as_strided.default))
    return _wrap_view(_map(op, (x, size, stride, storage_offset), None), (x,))


class rank_factories(TorchDispatchMode):
    """Let ops that see no tensor, such as `torch.zeros`, take sizes that differ between ranks.

    >>> with rank_factories():
    ...     torch.zeros(rank_int([1, 2])).shards
    (tensor([0.]), tensor([0., 0.]))

    Needed nowhere else, and slower for all ops inside: `x.new_zeros` does the same without it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not types and (_column(args) is not None or (kwargs and _column(list(kwargs.values())) is not None)):
            return RankTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# For code that knows about ranks -----------------------------------------------------------------------


def map_ranks(fn: Callable[..., Any], *tensors: Any) -> Any:
    """Call `fn(rank, *local tensors)` for every rank; autograd does not see it.

    >>> x = RankTensor([torch.ones(2), torch.ones(2)])
    >>> map_ranks(lambda rank, local: local * rank, x).shards
    (tensor([0., 0.]), tensor([1., 1.]))

    Without a per-rank argument the running simulated world says how many ranks there are.
    """
    columns = [_column(t) for t in tensors]
    lengths = {len(c) for c in columns if c is not None}
    n = _one_length(lengths) if lengths else _world_size()
    rows = [repeat(t, n) if c is None else c for t, c in zip(tensors, columns, strict=True)]
    with torch.no_grad():
        results = [fn(rank, *row) for rank, *row in zip(range(n), *rows, strict=True)]
    return _collect([_detached(r) for r in results], "map_ranks")


def _detached(result: Any) -> Any:
    return result.detach() if isinstance(result, torch.Tensor) and result.requires_grad else result


def replicate(tensor: torch.Tensor, ranks: int | None = None) -> RankTensor:
    """A copy of one tensor for every rank (of the running simulated world, unless a number is given)."""
    tensor = tensor.detach()
    return RankTensor([tensor.clone() for _ in range(ranks or _world_size())])


def common(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of rank 0 if all ranks hold the same values; otherwise an error."""
    if not isinstance(tensor, RankTensor):
        return tensor
    if tensor.requires_grad:
        raise RuntimeError("a tensor that requires grad leaves PyTorch only after detach()")
    if not same(tensor.shards):
        raise WorldError(
            f"one value of a tensor is needed, but its ranks differ: {tensor!r}",
            "look at one rank with `x.shards[rank]`, or communicate first so that all ranks hold the same",
        )
    return tensor.shards[0]


def _world_size() -> int:
    world = current_world()
    if world is None:
        raise WorldError("the number of ranks is unknown", "say it, or do this inside `with simulate(...)`")
    return world.size
