"""Placements: what one mesh axis does to a tensor.

A list with one placement for each mesh axis describes a distributed tensor. `P` describes it dim by dim: for each
tensor dim, the names of the axes that shard it, major to minor.

>>> Shard(0), Replicate(), Partial("max")
(Shard(dim=0), Replicate(), Partial(max))
>>> P("dp", ("tp", "cp"), None)
P('dp', ('tp', 'cp'), None)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.dynamo import constant_in_graphs
from .._torch.placements import torch_placement
from ..errors import InputError, PlacementError

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """What one mesh axis does to a tensor: shard it, replicate it, or hold operands of a reduction.

    Frozen and interned: equal placements are one object. They are also equal to PyTorch's placements of the same
    meaning, and have the same hash, so that programs may compare a `Shard` of either library with one of the other.

    >>> for placement in x.placements:
    ...     print(placement, placement.is_shard(), placement.is_shard(dim=0), placement.is_replicate())
    Shard(dim=0) True True False
    Shard(dim=1) True False False
    """

    __slots__ = ("__weakref__", "_hash")
    __match_args__: ClassVar[tuple[str, ...]] = ()
    _interned: ClassVar[dict[object, Any]] = {}
    _hash: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether this is a `Shard` (of that dim, if one is given)."""
        return False

    def is_replicate(self) -> bool:
        """Return whether every rank along this axis holds the same values."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return whether this is a `Partial` (with that reduce op, if one is given)."""
        return False

    @classmethod
    def _intern(cls, **fields: object) -> Self:
        key = (cls, *fields.values())
        found: Self | None = Placement._interned.get(key)
        if found is None:
            found = object.__new__(cls)
            for name, value in fields.items():
                object.__setattr__(found, name, value)
            object.__setattr__(found, "_hash", found._hash_of_torch(*fields.values()))
            found = Placement._interned.setdefault(key, found)  # another thread may have made it meanwhile
        return found

    @staticmethod
    def _hash_of_torch(*fields: object) -> int:
        """Return the hash of PyTorch's placement of the same meaning, if there is one."""
        return hash(fields)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or isinstance(other, Placement):
            return self is other
        same = as_placement(other)
        return NotImplemented if same is None else self is same

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a placement is frozen; make a new one to change {name}")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return code that makes this placement, and the names in it; torch.compile calls this."""
        kind = type(self)
        fields = ", ".join(repr(getattr(self, name)) for name in self.__match_args__)
        return f"{kind.__name__}({fields})", {kind.__name__: kind}


class AnyShard(Placement):
    """The axis shards tensor dim `dim`. Base class of `Shard`, whose shards are contiguous, and of others."""

    __slots__ = ("dim",)
    dim: int

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        """Return the shards of a plain tensor, and how many zeros pad each of them to the size of the first."""
        raise InputError(
            f"{self!r} does not define how one axis alone splits a tensor", "use Shard or InterleavedShard"
        )

    def _shard_tensor(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0) -> Tensor:
        """Return this rank's shard of a plain tensor along one mesh axis, with the values of rank `src_data_rank`."""
        if src_data_rank is not None:
            tensor = tensor.contiguous().clone()
            dist.broadcast(tensor, group=mesh.get_group(mesh_dim), group_src=src_data_rank)
        shards, _ = self._split_tensor(tensor, mesh.size(mesh_dim), with_padding=False)
        return shards[mesh.get_local_rank(mesh_dim)]


class Shard(AnyShard):
    """The axis shards tensor dim `dim` as `torch.chunk` does: the last ranks may hold less, or nothing.

    The other placements that shard a dim are no `Shard`, and `is_shard` is False for them: programs take a `Shard` for
    one contiguous piece of the dim.

    >>> distribute_tensor(torch.arange(7), mesh["tp"], [Shard(0)], src_data_rank=None).shards[1]
    tensor([4, 5, 6])
    """

    __slots__ = ()
    __match_args__ = ("dim",)

    def __new__(cls, dim: int) -> Self:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise InputError(f"Shard(dim={dim!r})", "the dim is an int, e.g. Shard(0)")
        return cls._intern(dim=dim)

    @staticmethod
    def _hash_of_torch(*fields: object) -> int:
        return hash(fields[0] if len(fields) == 1 else fields)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or self.dim == dim

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Return the size of a rank's shard of a dim, and the index of its first element, the dim's end if empty."""
        piece = -(-curr_local_size // num_chunks)
        first = min(rank * piece, curr_local_size)
        return min(piece, curr_local_size - first), first

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        """Return the shards of a plain tensor, and how many zeros pad each of them to the size of the first."""
        sizes = [self.local_shard_size_and_offset(tensor.shape[self.dim], num_chunks, i) for i in range(num_chunks)]
        shards = [tensor.narrow(self.dim, first, size) for size, first in sizes]
        shards, padding = _padded(shards, self.dim) if with_padding else (shards, [])
        return [shard.contiguous() if contiguous else shard for shard in shards], padding


def _padded(shards: list[Tensor], dim: int) -> tuple[list[Tensor], list[int]]:
    """Return the shards with zeros appended up to the size of the first, and how many zeros each got."""
    padding = [shards[0].shape[dim] - shard.shape[dim] for shard in shards]
    for i, missing in enumerate(padding):
        if missing:
            shape = list(shards[i].shape)
            shape[dim] = missing
            shards[i] = torch.cat([shards[i], shards[i].new_zeros(shape)], dim)
    return shards, padding


class InterleavedShard(AnyShard):
    """The axis shards each of `blocks` equal blocks of `dim`: every rank holds a shard of every block.

    With 8 rows, 2 blocks and 2 ranks, rank 0 holds rows 0, 1, 4, 5. A fused `[q; k; v]` weight is sharded by heads in
    this way (3 blocks), and so is a flattened `(batch, sequence)` dim if the sequence is sharded.

    >>> qkv = distribute_tensor(torch.arange(6), mesh, [Replicate(), InterleavedShard(0, blocks=3)])
    >>> qkv.shards[0], qkv.shards[1]
    (tensor([0, 2, 4]), tensor([1, 3, 5]))
    """

    __slots__ = ("blocks",)
    __match_args__ = ("dim", "blocks")
    blocks: int

    def __new__(cls, dim: int, blocks: int = 1, *, split_factor: int | None = None) -> Self:
        """Return the interned placement. `split_factor` is PyTorch's name for `blocks`."""
        blocks = blocks if split_factor is None else split_factor
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise InputError(f"InterleavedShard(dim={dim!r})", "the dim is an int, e.g. InterleavedShard(0, blocks=3)")
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
            raise InputError(f"InterleavedShard(blocks={blocks!r})", "the number of blocks is an int >= 1")
        return cls._intern(dim=dim, blocks=blocks)

    @property
    def split_factor(self) -> int:
        """The number of blocks, by PyTorch's name."""
        return self.blocks

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        """Return the shards of a plain tensor, each the concatenated shards of all blocks, and their padding."""
        blocks = tensor.chunk(self.blocks, self.dim)
        pieces = [Shard(self.dim)._split_tensor(block, num_chunks, with_padding=False)[0] for block in blocks]
        shards = [torch.cat(shard, self.dim) for shard in zip(*pieces, strict=True)]
        return _padded(shards, self.dim) if with_padding else (shards, [])

    def __repr__(self) -> str:
        return f"InterleavedShard(dim={self.dim}, blocks={self.blocks})"


class OrderedShard(AnyShard):
    """The axis is number `place` of the axes that shard `dim`: number 0 shards the dim, number 1 its shards, and so on.

    `DTensor.placements` contains it where an uneven dim is sharded over axes in another order than that of the mesh.
    All axes of that dim must be ordered. `P(("tp", "dp"))` is shorter to write.

    >>> x = distribute_tensor(torch.arange(6), mesh, [OrderedShard(0, place=1), OrderedShard(0, place=0)])
    >>> x.spec
    i64[6@(tp, dp)]
    """

    __slots__ = ("place",)
    __match_args__ = ("dim", "place")
    place: int

    def __new__(cls, dim: int, place: int = 0) -> Self:
        for name, value in (("dim", dim), ("place", place)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise InputError(f"OrderedShard({name}={value!r})", "it is an int, e.g. OrderedShard(0, place=1)")
        return cls._intern(dim=dim, place=place)

    def __repr__(self) -> str:
        return f"OrderedShard(dim={self.dim}, place={self.place})"


class Replicate(Placement):
    """Every rank along the axis holds the same values.

    >>> distribute_tensor(torch.arange(3), mesh, [Replicate(), Replicate()]).shards[3]
    tensor([0, 1, 2])
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        return cls._intern()

    @staticmethod
    def _hash_of_torch(*fields: object) -> int:
        return hash(-1)

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


class Partial(Placement):
    """Every rank along the axis holds an operand; the global value is their reduction by `reduce_op`.

    `Partial("prod")` is `Partial("product")`.

    >>> x = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    >>> x.spec, x.full_tensor().tolist()
    (f32[2] sum(dp), [2.0, 2.0])
    """

    __slots__ = ("reduce_op",)
    __match_args__ = ("reduce_op",)
    reduce_op: str
    ALL_REDUCE_OPS: ClassVar[tuple[str, ...]] = REDUCE_OPS
    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")

    def __new__(cls, reduce_op: str = "sum") -> Self:
        reduce_op = "product" if reduce_op == "prod" else reduce_op
        if reduce_op not in REDUCE_OPS:
            raise PlacementError(f"Partial({reduce_op!r}) is no known reduction", f"use one of {', '.join(REDUCE_OPS)}")
        return cls._intern(reduce_op=reduce_op)

    @staticmethod
    def _hash_of_torch(*fields: object) -> int:
        return 1 + hash(fields[0])

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op in (None, self.reduce_op) or (reduce_op == "prod" and self.reduce_op == "product")

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


class MaskPartial(Partial):
    """PyTorch's placement of an embedding's output before it is summed. No tensor of shardwise has it."""

    __slots__ = ()


_KINDS: dict[object, Callable[..., Placement]] = {
    kind.__name__: kind for kind in (Shard, InterleavedShard, Replicate, Partial)
}


def as_placement(value: object) -> Placement | None:
    """Return a placement unchanged, PyTorch's placements as ours of the same meaning, and None for anything else."""
    if isinstance(value, Placement):
        return value
    name, *fields = torch_placement(value) or ("",)
    if name == "Partial" and fields[0] not in REDUCE_OPS:
        return None
    return _KINDS[name](*fields) if name in _KINDS else None


class ShardOrderEntry(NamedTuple):
    """The mesh axes that shard one tensor dim, major to minor.

    >>> distribute_tensor(torch.arange(8), mesh, P(("tp", "dp"))).shard_order
    (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    """

    tensor_dim: int
    mesh_dims: tuple[int, ...]


ShardOrder = tuple[ShardOrderEntry, ...]
"""One entry for each sharded tensor dim, in ascending order."""

DimAxes = str | tuple[str, ...] | None


class P:
    """Placements dim by dim: the mesh axis, or tuple of axes (major to minor), that shards each tensor dim.

    Dims left out at the end are not sharded, axes that are not named replicate, and `partial` names the axes that
    hold operands of a reduction.

    >>> P("dp", ("tp", "cp"), None, partial={"ep": "sum"})
    P('dp', ('tp', 'cp'), None, partial={'ep': 'sum'})
    """

    __slots__ = ("__weakref__", "dims", "partial")

    def __init__(self, *dims: DimAxes, partial: Mapping[str, str] | None = None) -> None:
        for entry in dims:
            names = entry if isinstance(entry, tuple) else (entry,)
            if not all(name is None or isinstance(name, str) for name in names) or names.count(None) != (entry is None):
                raise InputError(f"P(...) got {entry!r}", "each entry is an axis name, a tuple of axis names, or None")
        if partial is not None and not isinstance(partial, Mapping):
            raise InputError(
                f"P(partial={partial!r})", 'name the axes and their reductions, e.g. partial={"tp": "sum"}'
            )
        self.dims = dims
        self.partial = dict(partial or {})

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.dims]
        if self.partial:
            parts.append(f"partial={self.partial!r}")
        return f"P({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and (self.dims, self.partial) == (other.dims, other.partial)

    def __hash__(self) -> int:
        return hash((self.dims, tuple(sorted(self.partial.items()))))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_p, (self.dims, self.partial)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return code that makes this object, and the names in it; torch.compile calls this."""
        return repr(self), {"P": P}

    def resolve(self, axis_names: Sequence[str], ndim: int) -> tuple[tuple[Placement, ...], ShardOrder]:
        """Return the placement of every axis of a mesh with these names, and the shard order."""
        if len(self.dims) > ndim:
            raise PlacementError(
                f"{self!r} names {len(self.dims)} dims of a tensor that has {ndim}",
                "give at most one entry for each dim",
            )
        placements: dict[str, Placement] = {}
        order: list[ShardOrderEntry] = []
        for dim, entry in enumerate(self.dims):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            self._use_axes(placements, axis_names, dict.fromkeys(names, Shard(dim)), len(names))
            if names:
                order.append(ShardOrderEntry(dim, tuple(axis_names.index(name) for name in names)))
        self._use_axes(placements, axis_names, {a: Partial(op) for a, op in self.partial.items()}, len(self.partial))
        return tuple(placements.get(name, Replicate()) for name in axis_names), tuple(order)

    def _use_axes(
        self, used: dict[str, Placement], axis_names: Sequence[str], new: Mapping[str, Placement], count: int
    ) -> None:
        """Add `new` to the axes used so far, once each; `count` is how many axes were named."""
        for name in new:
            if name not in axis_names:
                raise PlacementError(
                    f"{self!r} names the axis {name!r}", f"the mesh has the axes {', '.join(axis_names)}"
                )
            if name in used:
                raise PlacementError(
                    f"{self!r} uses the axis {name!r} twice", "name each axis once: it shards one dim, or is partial"
                )
        if len(new) != count:
            raise PlacementError(f"{self!r} uses an axis twice on one dim", "name each axis once")
        used.update(new)


def _rebuild_p(dims: tuple[DimAxes, ...], partial: dict[str, str]) -> P:
    return P(*dims, partial=partial)


Placements = Sequence[Placement] | P
"""What public functions accept as placements: a sequence with one for each mesh axis, or `P(...)`."""

for _kind in (Placement, Shard, InterleavedShard, OrderedShard, Replicate, Partial, MaskPartial, P):
    constant_in_graphs(_kind)
