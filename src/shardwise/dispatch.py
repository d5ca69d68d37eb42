"""From an op call on distributed tensors to the right answer.

A few ops keep the cut as it is and run on each rank's part (`_LOCAL`): copies, casts, fills, sums of alike operands.
All others are run whole: their inputs are gathered, every rank computes the same result, and what was written in
place goes back to where it came from. That is always right, if not always cheap.

This module works on local tensors and specs; `tensor` hands it its class and the way to wrap a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from .comm.redistribute import redistribute_local
from .errors import InputError, MeshError
from .mesh import MeshView
from .placement import Replicate
from .spec import DTensorSpec, TensorMeta, contiguous_meta

aten = torch.ops.aten
Wrap = Callable[[Tensor, DTensorSpec], Any]


class OpDispatcher:
    """Runs ops on distributed tensors of one class."""

    def __init__(self, kind: type[Any], wrap: Wrap) -> None:
        self.kind = kind
        self.wrap = wrap

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the op, wrapped."""
        local_rule = _LOCAL.get(func)
        if local_rule is not None:
            result = local_rule(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._run_whole(func, args, kwargs)

    def _run_whole(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, tree = pytree.tree_flatten((args, kwargs))
        ours = {id(value): value for value in flat if isinstance(value, self.kind)}
        view = _one_view(func, list(ours.values()))
        _check_plain(func, flat, self.kind)
        written = _written(func, args, kwargs)
        for tensor in written:
            _check_writable(func, tensor, self.kind)
        whole = {key: self._gathered(tensor, writable=tensor in written) for key, tensor in ours.items()}
        local_args, local_kwargs = pytree.tree_unflatten([whole.get(id(value), value) for value in flat], tree)
        result = func(*local_args, **local_kwargs)
        for tensor in written:
            _write_back(func, tensor, whole[id(tensor)])
        returned = {id(whole[id(tensor)]): tensor for tensor in written}

        def wrap(local: Tensor) -> Any:
            return returned.get(id(local)) if id(local) in returned else self.wrap(*_as_whole(local, view))

        return pytree.tree_map_only(Tensor, wrap, result)

    def _gathered(self, tensor: Any, writable: bool) -> Tensor:
        local = redistribute_local(tensor._local_tensor, tensor._spec, replicated(tensor._spec))
        return local.clone() if writable and local is tensor._local_tensor else local


class _Written(list[Any]):
    """The tensors an op writes. Membership is by identity, since == on tensors compares values."""

    def __contains__(self, value: object) -> bool:
        return any(value is mine for mine in self)


def replicated(spec: DTensorSpec) -> DTensorSpec:
    """The same tensor, whole on every rank."""
    return DTensorSpec(spec.mesh, (Replicate(),) * len(spec.view.sizes), spec.tensor_meta)


def _as_whole(local: Tensor, view: MeshView) -> tuple[Tensor, DTensorSpec]:
    local = local.contiguous()
    meta = contiguous_meta(local.shape, local.dtype)
    return local, DTensorSpec(view.mesh, (Replicate(),) * len(view.sizes), meta)


def _one_view(func: OpOverload, tensors: Sequence[Any]) -> MeshView:
    views = {tensor._spec.view for tensor in tensors}
    if len(views) > 1:
        specs = ", ".join(f"{tensor._spec!r} on {tensor._spec.view!r}" for tensor in tensors)
        raise MeshError(f"{func} on tensors of different meshes: {specs}", "bring them to one mesh first")
    return views.pop()


def _check_plain(func: OpOverload, flat: Sequence[Any], kind: type[Any]) -> None:
    for value in flat:
        if isinstance(value, Tensor) and not isinstance(value, kind) and value.dim() > 0:
            raise InputError(
                f"{func} mixes distributed tensors with a plain tensor of shape {list(value.shape)}",
                "make it one with distribute_tensor(tensor, mesh, placements) or DTensor.from_local(...)",
            )


def _written(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> _Written:
    written = _Written()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(value if isinstance(value, (list, tuple)) else [value])
    return written


def _check_writable(func: OpOverload, tensor: Any, kind: type[Any]) -> None:
    if not isinstance(tensor, kind):
        raise InputError(f"{func} would write a distributed result into a plain tensor", "write into a DTensor")
    if tensor._is_view():
        raise InputError(
            f"{func} would write through a view of a distributed tensor, {tensor._spec!r}, which is a copy",
            "write to the tensor itself, e.g. x.copy_(torch.where(mask, value, x))",
        )


def _write_back(func: OpOverload, tensor: Any, whole: Tensor) -> None:
    if whole.shape != tensor._spec.shape:
        raise InputError(f"{func} would change the shape of {tensor._spec!r}", "use the op that makes a new tensor")
    tensor._local_tensor.copy_(redistribute_local(whole, replicated(tensor._spec), tensor._spec))


# ---- ops that keep the cut ------------------------------------------------------------------------------------


def _is_linear(spec: DTensorSpec) -> bool:
    return all(op in ("sum", "avg") for _, op in spec.layout.partial)


def _same(dispatcher: OpDispatcher, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies and aliases: the same value, cut the same way."""
    tensor = args[0]
    local = func(tensor._local_tensor, *args[1:], **kwargs)
    return dispatcher.wrap(local, tensor._spec)


def _copy(dispatcher: OpDispatcher, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies that may change dtype or memory format. Rounding to integers does not pass through a sum."""
    tensor = args[0]
    local = func(tensor._local_tensor, *args[1:], **kwargs)
    spec = tensor._spec
    exact = local.dtype == spec.dtype or (local.dtype.is_floating_point and spec.dtype.is_floating_point)
    if spec.layout.partial and not exact:
        return NotImplemented
    if local.device.type not in (spec.view.device_type, "meta"):
        return NotImplemented
    meta = _result_meta(func, spec, args[1:], kwargs)
    return dispatcher.wrap(local, spec.with_meta(meta))


def _fill(dispatcher: OpDispatcher, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """New tensors like a given one: cut as it is cut, replicated where it is Partial."""
    spec = args[0]._spec.cotangent()
    local = func(args[0]._local_tensor, *args[1:], **kwargs)
    return dispatcher.wrap(local, spec.with_meta(_result_meta(func, spec, args[1:], kwargs)))


def _sum(dispatcher: OpDispatcher, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum of two operands that are cut alike, as gradients are when they meet."""
    one, other = args[0], args[1]
    if not (isinstance(one, dispatcher.kind) and isinstance(other, dispatcher.kind)):
        return NotImplemented
    if one._spec is not other._spec or not _is_linear(one._spec):
        return NotImplemented
    local = func(one._local_tensor, other._local_tensor, *args[2:], **kwargs)
    if func is aten.add_.Tensor:
        return one
    return dispatcher.wrap(local, one._spec)


def _overwrite(dispatcher: OpDispatcher, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy_`: the source comes to where the target is."""
    target, source = args[:2]
    if not isinstance(source, dispatcher.kind) or not isinstance(target, dispatcher.kind):
        return NotImplemented
    if source._spec.shape != target._spec.shape or source._spec.view is not target._spec.view or target._is_view():
        return NotImplemented
    spec = target._spec.with_meta(target._spec.tensor_meta._replace(dtype=source._spec.dtype))
    func(target._local_tensor, redistribute_local(source._local_tensor, source._spec, spec), *args[2:], **kwargs)
    return target


def _result_meta(func: OpOverload, spec: DTensorSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> TensorMeta:
    """Shape, stride and dtype of the result, found by running the op on a tensor without data."""
    shape, stride, dtype = spec.tensor_meta
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    result = func(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), *args, **kwargs)
    return TensorMeta(result.shape, result.stride(), result.dtype)


_LOCAL: dict[OpOverload, Callable[[OpDispatcher, OpOverload, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.zeros_like.default: _fill,
    aten.ones_like.default: _fill,
    aten.empty_like.default: _fill,
    aten.full_like.default: _fill,
    aten.add.Tensor: _sum,
    aten.add_.Tensor: _sum,
    aten.copy_.default: _overwrite,
}
