"""RankTensor: the local tensors of all ranks, as one tensor on which every op runs rank by rank.

>>> x = RankTensor([torch.ones(2), torch.zeros(2)])
>>> (x + 1).shards
(tensor([2., 2.]), tensor([1., 1.]))

In a simulated world `to_local()` returns one, so code written for one rank's local tensor runs unchanged for all ranks,
in lockstep. Autograd records ops on the RankTensor itself; the shards carry no autograd state. Values that leave the
tensors (`item()`, `bool()`, `tolist()`) must be the same on all ranks: one program cannot take two branches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from .._torch.dynamo import break_graph, compiles
from .._torch.fake_tensors import STAND_INS, is_traced
from .._torch.ops import OpOverload
from .._torch.wrapper import make_wrapper, no_torch_function, set_metadata
from ..errors import WorldError
from .agreement import same
from .implementation import implementation_of
from .rank_int import rank_int, rank_stride

if TYPE_CHECKING:
    import numpy

__all__ = ["RankTensor", "common", "shards_of", "wrap"]


class RankTensor(torch.Tensor):
    """One local tensor per rank, `shards[rank]`: of any sizes, but of one dtype, device and ndim.

    >>> local = RankTensor([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
    >>> (local * 10).shards
    (tensor([10.]), tensor([20., 30.]))
    """

    __slots__ = ("shards",)
    shards: tuple[torch.Tensor, ...]

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, shards: Iterable[torch.Tensor], *, requires_grad: bool = False) -> RankTensor:
        shards = tuple(s.detach() if s.requires_grad else s for s in shards)
        _check_shards(shards)
        out = wrap(shards)
        out.requires_grad = requires_grad
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if len(types) > 1 and not all(issubclass(t, (RankTensor, *STAND_INS)) for t in types):
            return NotImplemented  # another subclass, which may hold RankTensors, handles the op
        return implementation_of(func)(args, kwargs)

    # ---- values that leave the tensor -----------------------------------------------------------------------------

    def tolist(self) -> list[Any]:
        return common(self).tolist()

    def numpy(self, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        # A copy: writing through the array would change rank 0 only.
        return common(self.detach() if force else self).numpy(force=force).copy()

    def __format__(self, spec: str) -> str:
        if self.dim() == 0 and (spec or same(self.shards)):
            return format(self.item(), spec)
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        n, shards = len(self.shards), self.shards
        suffix = ""
        if self.grad_fn is not None:
            suffix = f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            suffix = ", requires_grad=True"
        if is_traced() or shards[0].is_meta:  # there are no values to compare
            return f"RankTensor({shards[0]!r} and those of {n - 1} other ranks{suffix})"
        if same(shards):
            return f"RankTensor({shards[0]!r}, same on all {n} ranks{suffix})"
        shown = range(n) if n <= 8 else [*range(4), *range(n - 2, n)]
        lines = [f"  rank {rank}: " + repr(shards[rank]).replace("\n", "\n  ") for rank in shown]
        if len(lines) < n:
            lines.insert(4, f"  ... {n - len(lines)} more ranks")
        return "RankTensor(\n" + "\n".join(lines) + suffix + "\n)"

    # ---- copies ---------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, _protocol: object) -> tuple[Callable[..., RankTensor], tuple[object, ...]]:
        return _rebuild, (self.shards, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("deepcopy of a RankTensor that is not a leaf: detach it first")
        out = _rebuild(copy.deepcopy(self.shards, memo), self.requires_grad, isinstance(self, torch.nn.Parameter))
        memo[id(self)] = out
        out.grad = copy.deepcopy(self.grad, memo)
        return out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the inner tensors; torch.compile calls this."""
        if any(type(size) is not int for size in (*self.shape, *self.stride())):
            break_graph("a simulated tensor with shards of different sizes, or with sizes that are symbols")
        return _shard_names(len(self.shards)), None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: object, stride: object) -> RankTensor:
        """Return the tensor that `__tensor_flatten__` has taken apart; torch.compile calls this."""
        return wrap(tuple(inner.values()))

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, RankTensor):
            raise WorldError(
                "the data of a RankTensor was set to a plain tensor", "set it to `shardwise.world.replicate(tensor)`"
            )
        set_metadata(self, other)
        self.shards = other.shards

    def backward(self, *args: object, **kwargs: object) -> None:
        from .factories import rank_factories

        with rank_factories():  # some derivative formulas create tensors from sizes alone
            super().backward(*args, **kwargs)

    # ---- memory: the shards have it, a RankTensor does not ---------------------------------------------------------

    def _no_memory(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise WorldError("a RankTensor has no memory of its own", "use the tensors in `x.shards`")

    __dlpack__ = __dlpack_device__ = apply_ = map_ = map2_ = share_memory_ = _no_memory

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raise an error, except while torch.compile traces, which describes the storages of its inputs."""
        return super().untyped_storage() if compiles() else self._no_memory()

    def contiguous(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:  # type: ignore[override]
        """Return the tensor if all shards are contiguous, otherwise a copy of all of them."""
        are = [shard.is_contiguous(memory_format=memory_format) for shard in self.shards]
        if all(are):
            return self
        return self.clone(memory_format=memory_format) if any(are) else super().contiguous(memory_format=memory_format)

    def data_ptr(self) -> int:
        """Return 0, as for every wrapper: code that copies tensors calls this, and then copies by ops."""
        return 0


def _shard_names(count: int) -> list[str]:
    """Return the names of attributes that are the shards of the first `count` ranks; define those that are missing."""
    names = [f"rank{rank}" for rank in range(count)]
    for rank, name in enumerate(names):
        if not hasattr(RankTensor, name):
            setattr(RankTensor, name, property(_shard_of(rank)))
    return names


def _shard_of(rank: int) -> Callable[[RankTensor], torch.Tensor]:
    return lambda tensor: tensor.shards[rank]


def _check_shards(shards: Sequence[torch.Tensor]) -> None:
    if not shards:
        raise WorldError("a RankTensor needs at least one tensor", "pass one tensor per rank")
    if any(isinstance(s, RankTensor) for s in shards):
        raise WorldError("a RankTensor got a RankTensor as the tensor of a rank", "pass one plain tensor per rank")
    for what in ("ndim", "dtype", "device"):
        found = [getattr(s, what) for s in shards]
        for rank, value in enumerate(found):
            if value != found[0]:
                raise WorldError(
                    f"rank {rank}'s tensor has {what} {value}, rank 0's has {found[0]}",
                    "the local tensors of one RankTensor may differ in sizes and values only",
                )


def _rebuild(shards: tuple[torch.Tensor, ...], requires_grad: bool, is_parameter: bool) -> RankTensor:
    """Make a RankTensor from its pickled form."""
    out = RankTensor(shards, requires_grad=requires_grad)
    return cast(RankTensor, torch.nn.Parameter(out, requires_grad)) if is_parameter else out


torch.serialization.add_safe_globals([_rebuild])


# ---- wrapping -----------------------------------------------------------------------------------------------------

_shape_of = attrgetter("shape")
_stride_of = torch.Tensor.stride


def wrap(shards: tuple[torch.Tensor, ...]) -> RankTensor:
    """Return the RankTensor of these shards. Sizes and strides that differ become per-rank integers."""
    first = shards[0]
    n = len(shards)
    shapes = list(map(_shape_of, shards))
    strides = list(map(_stride_of, shards))
    shape: Sequence[int | torch.SymInt] = shapes[0]
    stride: Sequence[int | torch.SymInt] = strides[0]
    if shapes.count(shapes[0]) != n or strides.count(strides[0]) != n:
        _check_shards(shards)
        sizes, steps = list(zip(*shapes, strict=True)), list(zip(*strides, strict=True))
        shape = list(map(rank_int, sizes))
        stride = list(map(_common_stride, sizes, steps))
    offset = first.storage_offset()
    if offset and all(s.storage_offset() == offset for s in shards):
        out = make_wrapper(RankTensor, shape, stride, offset, dtype=first.dtype, device=first.device)
    else:  # where offsets differ, each shard counts as starting its memory: see `aten_ops.as_strided`
        out = make_wrapper(RankTensor, shape, stride, dtype=first.dtype, device=first.device)
    out.shards = shards
    return out


def _common_stride(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int | torch.SymInt:
    """Return the stride of one dim; ranks on which the dim has size 0 or 1, where it means nothing, do not count."""
    meaningful = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    if meaningful and all(stride == meaningful[0] for stride in meaningful):
        return meaningful[0]
    return rank_stride(strides)


def shards_of(local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the shards in a local tensor: the tensor itself, or one shard for each simulated rank.

    >>> shards_of(RankTensor([torch.ones(2), torch.zeros(1)]))
    (tensor([1., 1.]), tensor([0.]))
    """
    if type(local) is torch.Tensor:
        return (local,)
    return local.shards if isinstance(local, RankTensor) else (local,)


def common(tensor: torch.Tensor) -> torch.Tensor:
    """Return rank 0's local tensor if all ranks hold the same values, otherwise raise an error.

    >>> common(RankTensor([torch.tensor([1.0]), torch.tensor([1.0])]))
    tensor([1.])
    """
    if not isinstance(tensor, RankTensor):
        return tensor
    if tensor.requires_grad:
        raise RuntimeError("cannot read the values of a RankTensor that requires grad: detach it first")
    if not same(tensor.shards):
        raise WorldError(
            f"one value of a tensor is needed, but the ranks differ: {tensor!r}",
            "read one rank's value from `x.shards[rank]`, or communicate first so that all ranks hold the same",
        )
    return tensor.shards[0]
