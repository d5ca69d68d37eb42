"""Shapes, strides and dtypes of an op's results, without running it on data.

PyTorch's meta kernels compute them, at up to milliseconds a call. For an op whose results take their sizes from its
operands, it is cached which size comes from which dim, so that a new batch size does not run them again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.fake_tensors import on_meta
from .._torch.modes import without_modes
from .._torch.ops import OpOverload, OpOverloadPacket, schema_of
from .._torch.symbols import has_symbols, hinted, shape_inference, specialized
from ..errors import WorldError
from ..notation import Bound, BoundTensor
from ..notation.patterns import Pattern
from ..ops.resolve import ResolvedOp
from ..sharding.memory_order import TensorMeta, contiguous_meta, contiguous_stride


class NoRule(Exception):
    """The op has no rule that fits this call; it is decomposed, or runs on gathered inputs."""


def results_without_out(func: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Return the results of a call without its `out=` tensors, as meta tensors; raise the op's own error."""
    packet = func.overloadpacket
    found = results_of_zeros(packet, *specialized((list(args), kwargs)))
    if found is not None:
        return found
    with shape_inference(args, list(kwargs.values())), torch.no_grad():
        return packet(*map(_meta_tensor, args), **{n: _meta_tensor(v, n) for n, v in kwargs.items()})


def result_metas(func: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> Any:
    """Return the results of a call as meta tensors with shapes, strides and dtypes; raise the op's own error."""
    with shape_inference(args, list(kwargs.values())), torch.no_grad():
        try:
            results = func(*map(_meta_tensor, args), **{n: _meta_tensor(v, n) for n, v in kwargs.items()})
            is_new = not func.is_view and not schema_of(func).is_mutable
            return pytree.tree_map_only(Tensor, _not_expanded, results) if is_new else results
        except NotImplementedError as error:
            found = results_of_zeros(func, *specialized((list(args), kwargs)))
            if found is None:
                raise NoRule(f"{func} has no meta kernel") from error
            return found
        except Exception as error:
            own = _own_error(func, args, kwargs)
            if own is not None:
                raise own from error
            # The meta kernel may refuse what the op itself accepts.
            found = results_of_zeros(func, *specialized((list(args), kwargs)))
            if found is None:
                raise
            return found


def requested_results(outputs: Any, mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the results with None for those that a mask does not request."""
    return tuple(output if asked else None for output, asked in zip(outputs, mask, strict=True))


def _not_expanded(result: Tensor) -> Tensor:
    """Return a new tensor row-major if it is expanded: some meta kernels copy that from operands, no op does."""
    expanded = any(step == 0 and size > 1 for size, step in zip(result.shape, result.stride(), strict=True))
    return torch.empty_like(result, memory_format=torch.contiguous_format) if expanded else result


_OWN_ERRORS = 1 << 24  # elements up to which a failed call is repeated with zeros, for the op's own error
_FEW = 1 << 12  # elements up to which `refuse_what_fails` calls an op with the given sizes; larger ones are shrunk
_REAL_RESULTS = 1 << 24  # elements up to which an op without a meta kernel is run on zeros, for its results


def results_of_zeros(
    func: OpOverload | OpOverloadPacket, args: Sequence[object], kwargs: dict[str, object], most: int = _REAL_RESULTS
) -> object:
    """Return the results of an op on zeros, as meta tensors.

    Return None if the op raises, if its operands have more than `most` elements, or if their sizes are symbols.
    """
    metas = [value for value in pytree.tree_leaves((args, kwargs), is_leaf=_is_meta) if _is_meta(value)]
    if has_symbols(metas) or sum(meta.shape.numel() for meta in metas) > most:
        return None

    try:
        given, named = pytree.tree_map(_zeros, (list(args), kwargs), is_leaf=_is_meta)
        with without_modes(), torch.no_grad():
            result = func(*given, **{n: "cpu" if n == "device" and v is not None else v for n, v in named.items()})
    except Exception:
        return None
    return pytree.tree_map_only(Tensor, on_meta, result)


def with_real_dtypes(op: ResolvedOp, args: Sequence[object], kwargs: dict[str, object], outputs: object) -> object:
    """Return the results of a call on mixed dtypes, as meta tensors, with the dtypes that the op gives them.

    Some meta kernels promote where the op itself does not: `huber_loss` has the dtype of its first operand. The op is
    run on zeros with sizes of at most 1: dtypes do not depend on sizes.
    """
    given, tags = (list(args), kwargs), op.func.tags
    dtypes = {value.dtype for value in pytree.tree_leaves(given, is_leaf=_is_meta) if _is_meta(value)}
    if torch.Tag.pointwise not in tags:  # integers are indices there, and zeros may not be valid ones
        dtypes = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    if len(dtypes) < 2 or op.variant != "functional" or torch.Tag.nondeterministic_seeded in tags:
        return outputs
    found = results_of_zeros(op.func, *pytree.tree_map(_small, given, is_leaf=_is_meta))
    flat, tree = pytree.tree_flatten(outputs)
    real = pytree.tree_leaves(found)
    if found is None or len(real) != len(flat):
        return outputs
    return pytree.tree_unflatten(list(map(_with_dtype_of, flat, real)), tree)


def with_dtypes(outputs: Any, dtypes: Sequence[torch.dtype]) -> object:
    """Return the results, which are meta tensors, with these dtypes."""
    flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if [output.dtype for output in flat] == list(dtypes):
        return outputs
    made = [
        torch.empty_strided(output.shape, output.stride(), dtype=dtype, device="meta")
        for output, dtype in zip(flat, dtypes, strict=True)
    ]
    return type(outputs)(made) if flat is outputs else made[0]


def _small(value: object) -> object:
    return contiguous_meta([min(n, 1) for n in value.shape], value.dtype) if isinstance(value, TensorMeta) else value


def _with_dtype_of(output: object, real: object) -> object:
    if not isinstance(output, Tensor) or not isinstance(real, Tensor) or output.dtype == real.dtype:
        return output
    return torch.empty_strided(output.shape, output.stride(), dtype=real.dtype, device="meta")


def _own_error(func: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> Exception | None:
    """Return the error that an op raises for real tensors of zeros; None if it raises none, or they are too large."""
    args, kwargs = hinted((list(args), kwargs))
    metas = [value for value in pytree.tree_leaves((args, kwargs), is_leaf=_is_meta) if _is_meta(value)]
    if sum(meta.shape.numel() for meta in metas) > _OWN_ERRORS:
        return None

    try:
        given, named = pytree.tree_map(_zeros, (list(args), kwargs), is_leaf=_is_meta)
        with without_modes(), torch.no_grad():
            func(*given, **{name: value for name, value in named.items() if name != "device"})
    except Exception as error:
        return error
    return None


def error_of_out(
    func: OpOverload, args: Sequence[object], kwargs: dict[str, object], without_out: dict[str, object]
) -> Exception | None:
    """Return the error that an op raises for the dtypes of its `out=` tensors; None if there is none.

    None also if the call fails without them: `without_out` is `kwargs` without the `out=` tensors. The op is called
    with small tensors of zeros. Tensors are given as `TensorMeta`s.
    """
    small = _shrunk(list(args))
    named, others = ({name: _shrunk(value) for name, value in given.items()} for given in (kwargs, without_out))
    if results_of_zeros(func.overloadpacket, small, others) is None:
        return None
    outs = {name: contiguous_meta((0,), named[name].dtype) for name in named.keys() - others.keys()}
    return _own_error(func, small, named | outs)


def refuse_what_fails(
    op: ResolvedOp, args: Sequence[object], kwargs: dict[str, object], *, on_cpu: bool, skips_empty: bool
) -> None:
    """Raise the op's own error for a call that its meta kernel accepts, and that some ranks would accept.

    Ranks accept it where other code replaces the op (a kernel, or its local implementation), or, with `skips_empty`,
    where they have empty shards and do not call it. Raised are errors of dtypes that the op does not take, or not
    together, and of tensors without elements. Other errors may be due to the zeros that the op is called with here.
    """
    func = op.func
    args, kwargs = hinted((list(args), kwargs))
    metas = [value for value in (*args, *kwargs.values()) if _is_meta(value)]
    mixed = len({meta.dtype for meta in metas if meta.dtype.is_floating_point or meta.dtype.is_complex}) > 1
    few = sum(meta.shape.numel() for meta in metas) <= _FEW
    empty = any(meta.shape.numel() == 0 for meta in metas)
    # Backward ops, which autograd calls, get tensors that the forward pass saved, in the dtypes of local code.
    by_user = "backward" not in str(func)
    if by_user and torch.Tag.nondeterministic_seeded not in func.tags:
        small, named = (args, kwargs) if few else (_shrunk(args), {n: _shrunk(v) for n, v in kwargs.items()})
        tried = _call_key(small, named, on_cpu)
        if op.accepted.get(tried) is None:
            error = _own_error(func, small, named)
            if error is not None and _must_be_raised(error, func, small, named, on_cpu, few and empty):
                raise error
            op.accepted[tried] = True
    if mixed and skips_empty:
        error = _own_error(func, args, kwargs)
        if error is not None:
            raise error


def _call_key(args: Sequence[object], kwargs: dict[str, object], on_cpu: bool) -> Hashable:
    """Return what the error of an op on zeros depends on. Numbers are represented by `repr`: 1, 1.0 and True differ."""
    values = [value if _is_meta(value) else repr(value) for value in (*args, *kwargs.values())]
    return (on_cpu, *kwargs, *values)


def _must_be_raised(
    error: Exception, func: OpOverload, args: Sequence[object], kwargs: dict[str, object], on_cpu: bool, empty: bool
) -> bool:
    if "ZeroDivisionError" in str(error):
        return False  # due to the zeros
    if isinstance(error, NotImplementedError):
        return on_cpu and "Could not run" not in str(error)  # other devices take other dtypes
    if on_cpu and _own_error(func, *_as_floats(args, kwargs)) is None:
        return True
    return empty and not isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


def _as_floats(args: Sequence[object], kwargs: dict[str, object]) -> tuple[Sequence[object], dict[str, object]]:
    """Return the arguments of a call with all tensors float32: if the op takes these, the dtypes are at fault."""

    def floating(value: object) -> object:
        return value._replace(dtype=torch.float32) if isinstance(value, TensorMeta) else value

    found: tuple[Sequence[object], dict[str, object]] = pytree.tree_map(
        floating, (list(args), kwargs), is_leaf=_is_meta
    )
    return found


def _shrunk(value: Any) -> Any:
    """Return the meta of a row-major tensor with sizes of at most 2, also in lists; other values unchanged."""
    if isinstance(value, TensorMeta):
        return contiguous_meta([min(size, 2) for size in value.shape], value.dtype)
    return [_shrunk(element) for element in value] if isinstance(value, list) else value


def _is_meta(value: object) -> TypeGuard[TensorMeta]:
    return isinstance(value, TensorMeta)


def _zeros(value: object) -> object:
    """Return a real tensor of zeros with the shape, strides and dtype of a `TensorMeta`; other values unchanged."""
    if not isinstance(value, TensorMeta):
        return value
    shape, stride, dtype = value
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if shape.numel() else 0
    return torch.zeros(size, dtype=dtype).as_strided(shape, stride)


def _meta_tensor(value: object, name: str = "") -> object:
    if isinstance(value, TensorMeta):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_meta_tensor(element) for element in value]
    if isinstance(value, torch.device) or (name == "device" and value is not None):
        return torch.device("meta")
    return value


# ---- cached forms ---------------------------------------------------------------------------------------------------

Size = tuple[int, int] | None
"""Where a size of a result comes from: (operand, dim); None for a dim that the rule writes as `1`."""


class ResultForm(NamedTuple):
    """The results of an op for operands with these dtypes and numbers of dims, all row-major; results are, too."""

    dtypes: tuple[torch.dtype | None, ...]
    sizes: tuple[tuple[Size, ...], ...]
    kind: type | None
    """The type of the collection of results; None for a single one."""


def form_key(op: ResolvedOp, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Return what the form of the results depends on; None for calls whose results are not cached."""
    if op.variant != "functional" or op.is_view:
        return None
    key: list[object] = [torch.get_default_dtype()]
    for value in (*args, *kwargs.values()):
        if isinstance(value, TensorMeta):
            if value.stride != contiguous_stride(value.shape) or any(size < 2 for size in value.shape):
                return None  # sizes of 1 broadcast, and other strides are kept or not
            key.append((len(value.shape), value.dtype))
        elif isinstance(value, (list, tuple)):
            if any(isinstance(element, (TensorMeta, list, tuple)) for element in value):
                return None
            key.append(tuple(value))
        else:
            key.append((type(value), value))
    try:
        hash(made := (*key, *kwargs))
    except (TypeError, WorldError):  # a SymInt, and a float that differs between simulated ranks
        return None
    return made


def cache_form(op: ResolvedOp, key: object, bound: Bound, outputs: object) -> None:
    """Cache the form of these results, if each of their sizes is that of an operand's dim.

    A factor that is handled by a kernel, or that is ragged, may have other sizes in a result, and a size argument sets
    sizes directly. Results of such rules are cached only if the op is known to keep sizes anyway (`keeps_sizes`).
    """
    rule = bound.rule
    if key is None or ((rule.kernel or rule.ragged or rule.size_arguments) and not op.op.keeps_sizes):
        return
    flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if len(flat) != len(bound.outputs) or not all(isinstance(t, BoundTensor) or t is None for t in bound.inputs):
        return
    sizes = []
    for tensor, output, pattern in zip(flat, bound.outputs, rule.outputs, strict=True):
        found: tuple[Size, ...] | None = ()
        if isinstance(tensor, Tensor) and isinstance(output, BoundTensor):
            found = _sources(bound, output, pattern)
        if found is None or (isinstance(tensor, Tensor) and not tensor.is_contiguous()):
            return
        shape = tensor.shape if isinstance(tensor, Tensor) else ()
        if any(p and n != bound.inputs[p[0]].shape[p[1]] for n, p in zip(shape, found, strict=True)):
            return
        sizes.append(found)
    dtypes = tuple(tensor.dtype if isinstance(tensor, Tensor) else None for tensor in flat)
    op.result_forms[key] = ResultForm(dtypes, tuple(sizes), type(outputs) if flat is outputs else None)


def _sources(bound: Bound, output: BoundTensor, pattern: Pattern) -> tuple[Size, ...] | None:
    """Return where the sizes of a result come from; None if some size is not that of an operand's dim."""
    if "_" in str(pattern):
        return None  # a dim without a factor may have any size, also if it is 1 in this call
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for i, tensor in enumerate(bound.inputs):
        for dim, factors in enumerate(tensor.dims if tensor is not None else ()):
            places.setdefault(factors, (i, dim))
    sources: list[Size] = []
    for size, factors in zip(output.shape, output.dims, strict=True):
        if len(factors) == 1 and factors in places:
            sources.append(places[factors])
        elif not factors and size == 1:
            sources.append(None)
        else:
            return None
    return tuple(sources)


def cached_results(op: ResolvedOp, key: object, operands: Sequence[object]) -> object:
    """Return the results of a call by their cached form, as meta tensors; None if no form is cached."""
    found = op.result_forms.get(key) if key is not None else None
    if found is None:
        return None
    shapes = [[1 if place is None else operands[place[0]].shape[place[1]] for place in sizes] for sizes in found.sizes]
    with shape_inference(shapes):  # planning is no part of what a mode records
        made = [
            None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(shapes, found.dtypes, strict=True)
        ]
    return made[0] if found.kind is None else found.kind(made)
