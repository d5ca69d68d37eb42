"""Calls with `out=` tensors that the results do not fit: they are resized to the shapes of the results.

>>> out = x.new_empty(0)
>>> torch.add(x, y, out=out)             # out has the shape and placements of the sum now
>>> torch.add(x, y, out=torch.empty(0))  # a plain tensor without elements gets the global value
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.ops import OpOverload
from ..comm.redistribute import redistribute_local
from ..errors import InputError
from ..ops.replicated import as_replicated
from ..ops.resolve import ResolvedOp
from ..ops.schema import has_functional_variant
from ..sharding.base import DTensorBase
from ..sharding.memory_order import contiguous_stride, meta_of
from .arguments import Args, Kwargs, plain_target_error
from .gather_cache import after_write
from .result_meta import error_of_out


def run_into_out(op: ResolvedOp, args: Args, kwargs: Kwargs) -> object:
    """Run the op without `out=`, store its results in the `out=` tensors, and return these.

    Return NotImplemented if the op has no variant without `out=`.
    """
    names = [op.names[position] for position in op.writes]
    if not has_functional_variant(op.func) or not all(name in kwargs for name in names):
        return NotImplemented
    outs: list[Tensor] = [kwargs[name] for name in names]
    given = {name: value for name, value in kwargs.items() if name not in names}
    if not any(isinstance(value, Tensor) for value in pytree.tree_leaves((args, given))):
        return _fill(op, args, given, outs[0])
    if "dtype" in op.names and given.get("dtype") is None and not op.name.endswith("norm"):
        given["dtype"] = outs[0].dtype  # a sum is computed in the dtype of `out`, a norm is not
    refuse_other_dtypes(op.func, args, kwargs, given)
    found = pytree.tree_leaves(op.func.overloadpacket(*args, **given))
    if len(found) != len(outs):
        return NotImplemented
    for out, result in zip(outs, found, strict=True):
        store(op.func, result, out)
    return outs[0] if len(outs) == 1 else tuple(outs)


def refuse_other_dtypes(func: OpOverload, args: Args, kwargs: Kwargs, without_out: Kwargs) -> None:
    """Raise the error of one device if the op does not write into tensors of the dtypes given as `out=`.

    Most ops convert their results, some do not: `torch.clamp(x, min=0, out=double)` of a float `x`.
    """
    if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in kwargs.values()):
        return  # other devices have other errors
    metas, named, others = pytree.tree_map_only(Tensor, meta_of, (list(args), kwargs, without_out))
    error = error_of_out(func, metas, named, others)
    if error is not None:
        raise error


def _fill(op: ResolvedOp, args: Args, kwargs: Kwargs, out: Any) -> object:
    """Fill `out` by a factory, as in `torch.eye(8, out=out)`: every rank computes all of it, and keeps its shard."""
    refuse_draw_into(op.func, out)
    made = op.func.overloadpacket(*args, **{**kwargs, "dtype": out.dtype, "device": out.device})
    store(op.func, as_replicated(made, out), out)
    return out


def refuse_draw_into(func: OpOverload, out: Tensor) -> None:
    """Raise an error if a factory would draw random numbers into a distributed tensor."""
    if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, DTensorBase):
        raise InputError(
            f"{func} cannot draw into the DTensor {out._spec!r} as out=: each rank would draw numbers of its own",
            "use an in-place op, such as out.normal_(), or a factory with placements, such as "
            "shardwise.randn(8, 4, device_mesh=mesh, placements=[Shard(0), ...])",
        )


def store(func: OpOverload, result: Tensor, out: Tensor) -> None:
    """Write a result into the tensor given as `out=`, which takes the shape of the result."""
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"result type {_name(result)} can't be cast to the desired output type {_name(out)}")
    resized = out.shape != result.shape
    if resized and out.numel():
        warnings.warn(
            f"{func} changes the shape of its out= tensor from {list(out.shape)} to {list(result.shape)}; "
            "PyTorch will refuse this in future: resize it to zero elements first, out.resize_(0)",
            stacklevel=2,
        )
    if not isinstance(out, DTensorBase):
        _fill_plain(func, result, out)
    elif resized:
        out.data = _written_to_base(out, result.detach().to(out.dtype))
        after_write(out)
    else:
        out.copy_(result)


def _written_to_base(out: DTensorBase, result: Tensor) -> Tensor:
    """Write a result into the base of `out`, at the offset of `out`, and return it as a view of the base.

    On one device `out` keeps its memory when it is resized, and gets more if the result needs it.
    """
    base: Any = out._base
    if base is None or base.dtype != out.dtype or not base._spec.dense:
        return result
    begin = int(out.storage_offset()) - int(base.storage_offset())
    count = min(result.numel(), base.numel() - begin)
    base.as_strided((count,), (1,), out.storage_offset()).copy_(result.reshape(-1)[:count])
    offset = int(out.storage_offset())
    if count < result.numel():  # in the new memory, `out` keeps its offset
        flat = result.reshape(-1)
        base = torch.cat([flat.new_zeros(offset), flat])
    view: Tensor = base.as_strided(result.shape, contiguous_stride(result.shape), offset)
    return view


def _fill_plain(func: OpOverload, result: Any, out: Tensor) -> None:
    if out.numel():
        raise plain_target_error(func, out.shape, [result._spec])
    spec = result._spec
    out.resize_(result.shape)
    out.copy_(redistribute_local(result._local_shard, spec, spec.replicated()))


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.").capitalize()
