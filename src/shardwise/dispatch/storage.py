"""Ops that address the storage of a tensor: `as_strided`, whose offset counts from the beginning of the storage.

A view has the storage of its base, so that `as_strided` of the view may address other elements of the base.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import SymInt

from .._torch.symbols import has_symbols
from ..errors import InputError
from ..ops.registry import resolve
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from .arguments import Args, Kwargs


def on_storage(op: ResolvedOp, args: Args, kwargs: Kwargs) -> Args:
    """Return the arguments of such an op, with an offset that counts from its first argument.

    The first argument becomes the base of the view if the op addresses other elements than those of the view.
    """
    given = op.arguments(args, kwargs)
    tensor, offset = given["self"], given["storage_offset"]
    if not isinstance(tensor, DTensorBase):
        return tuple(given[name] for name in op.names)
    begin = tensor.storage_offset()
    offset = begin if offset is None else offset
    same = tuple(given["size"]) == tuple(tensor.shape) and tuple(given["stride"]) == tensor.stride()
    if not (same and offset == begin):
        tensor = _memory_owner(op, tensor) if op.is_view else tensor
        begin = tensor.storage_offset()
        if offset < begin or not tensor._spec.dense:
            wanted = f"size {list(given['size'])}, stride {list(given['stride'])} and storage_offset {offset}"
            raise InputError(
                f"{op.func} with {wanted} of a view of {tensor._spec!r} reaches memory that the tensor does not hold",
                "call it on the tensor that owns the memory: base.as_strided(size, stride, storage_offset)",
            )
        _require_memory(op, tensor, given["size"], given["stride"], offset - begin)
    given |= {"self": tensor, "storage_offset": offset - begin}
    return tuple(given[name] for name in op.names)


def _require_memory(
    op: ResolvedOp, tensor: DTensorBase, size: Sequence[int], stride: Sequence[int], offset: int | SymInt
) -> None:
    """Raise an error, as PyTorch does, if the op addresses elements behind the end of a tensor's memory."""
    if has_symbols((size, stride, offset)) or 0 in size:
        return
    end = 1 + offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if end > tensor.numel():
        raise RuntimeError(
            f"{op.func}: size {list(size)} and stride {list(stride)} reach element {end - 1}, "
            f"but {tensor._spec!r} has {tensor.numel()} elements"
        )


def _memory_owner(op: ResolvedOp, tensor: DTensorBase) -> DTensorBase:
    """Return the tensor that owns the memory of a view, or the view itself if that is not recorded.

    A conjugate counts as the owner: here it has values of its own, while on one device it is a view with a bit set.
    """
    owner = tensor
    while owner._source is not None and (view := owner._source.replays()) is not None:
        found = resolve(view.func)
        local = (found.built_in or found).op.local  # whatever the user's rule is, a conjugate has values of its own
        if local is not None and local.copies:
            return owner
        owner = view.root
    base = tensor._base
    return base if isinstance(base, DTensorBase) and base.dtype == tensor.dtype else tensor
