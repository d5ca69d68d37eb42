"""Copies, casts, aliases, new tensors like a given one, changes of shape in place, and sparse tensors, which raise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import InputError
from ..sharding.base import DTensorBase
from .call import Call, Kwargs
from .kernel import LocalCall
from .op import Local
from .registry import definitions_in

define = definitions_in(__name__)

# ---- copies and aliases -------------------------------------------------------------------------------------------

SAME = "x.. -> x.. ; linear 0 ; monotone 0"


def put_itself(given: Kwargs) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the write that replaces all values of the tensor, as a write to its alias does."""
    return lambda root, value: value


def cast(call: Call) -> str:
    """Return the rule: a cast passes sums.

    Dispatch reduces them first if the dtypes forbid it (`Bound.reduced_first`).
    """
    target = call.arg("dtype", None)
    same = target is None or target == call.tensors[0].dtype
    return SAME if same else "x.. -> x.. ; linear 0"


define(("aten::detach", "aten::alias", "prims::view_of"), SAME, put=put_itself)
define(("aten::clone", "aten::lift_fresh"), SAME)
define("aten::_to_copy", cast)
define("aten::copy", "b.., b?.. -> b.. ; linear 0+1")

# ---- new tensors --------------------------------------------------------------------------------------------------


def new(call: Call) -> str:
    """Return the rule: a new tensor of the given one's shape is sharded like it; one of another shape is replicated."""
    size = tuple(call.arg("size"))
    if size == call.shape(0):
        return "x.. -> x.. ; size=(x..)"
    return f"x.. -> {' '.join('_' for _ in size)} ; unread"


def new_empty_strided(call: LocalCall) -> Tensor:
    """Return local memory without gaps, with the dims in the order of the global strides."""
    shape, stride = call.local_shape(), call["stride"]
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    made: Tensor = call["self"].new_empty([shape[dim] for dim in order], dtype=call.dtypes[0], device=call["device"])
    return made.permute([order.index(dim) for dim in range(len(shape))])


define("aten::zeros_like", SAME)
define(("aten::ones_like", "aten::empty_like", "aten::full_like"), "x.. -> x..", reads_shape_only=True)
define(("aten::new_zeros", "aten::new_ones", "aten::new_empty", "aten::new_full"), new, reads_shape_only=True)
define("aten::new_empty_strided", new, local=Local(new_empty_strided), reads_shape_only=True)

# ---- shapes that change in place ------------------------------------------------------------------------------------
#
# The first elements stay, in row-major order. PyTorch leaves elements beyond them undefined; here they are zero.


def resize(x: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Resize as `resize_`: leave a tensor of this size unchanged, else take the first elements in its memory."""
    if memory_format not in (None, torch.contiguous_format):
        raise InputError(
            f"resize_ of {_text(x)} to {list(size)} with memory_format={memory_format}: the result of a distributed "
            "tensor is always row-major",
            "call x.resize_(size) without memory_format",
        )
    same = tuple(size) == tuple(x.shape)
    if (same and memory_format is None) or (same and x.is_contiguous()):
        return x
    flat, count, offset = _in_memory(x), math.prod(size), int(x.storage_offset())
    missing = count - flat.numel()
    if missing > 0:  # memory before the first element stays
        flat = torch.cat([flat.new_zeros(offset), flat, flat.new_zeros(missing)])[offset:]
    x.data = flat[:count].view(size)
    return x


def _text(x: Tensor) -> str:
    return repr(x._spec) if isinstance(x, DTensorBase) else f"a plain tensor of shape {list(x.shape)}"


def _in_memory(x: Tensor) -> Tensor:
    """Return the memory from the first element of `x` to the last of `x` or of what it views, as one dim."""
    if x.is_contiguous() and x._base is None:
        return x.reshape(-1)
    ends = [_end(held) for held in (x, x._base) if held is not None]
    offset = int(x.storage_offset())
    return x.as_strided([max(ends) - offset], [1], offset)


def _end(x: Tensor) -> int:
    """Return the offset in storage after the last element in memory."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset()) + (last + 1 if x.numel() else 0)


def resize_as(x: Tensor, other: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Resize as `resize_as_`: to the shape of another tensor."""
    return resize(x, other.shape, memory_format=memory_format)


define("aten::resize_", decomposition=resize)
define("aten::resize_as_", decomposition=resize_as)

# ---- local shards ---------------------------------------------------------------------------------------------------

define("aten::_values", returns_shard=True)  # see `_torch.wrapper.counted_as`

# ---- sparse tensors -------------------------------------------------------------------------------------------------


def refuse_sparse(x: Tensor, *args: object, **kwargs: object) -> NoReturn:
    """Raise the error that says why there are no sparse distributed tensors."""
    raise InputError(
        f"{_text(x)} cannot become a sparse tensor: a distributed tensor is dense", "use x.full_tensor().to_sparse()"
    )


for _layout in ("", "_csr", "_csc", "_bsr", "_bsc"):
    define((f"aten::_to_sparse{_layout}", f"aten::_to_sparse{_layout}.out"), decomposition=refuse_sparse)
define("aten::_to_sparse.sparse_dim_out", decomposition=refuse_sparse)
