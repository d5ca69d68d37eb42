"""Views: the same elements under other dims. Slices are in `slices`, diagonals and windows in `strided`.

A view only moves elements, so the view of a Partial operand is Partial. Besides its rule, the record of a view op has
`put`, which applies a write to the view to the tensor that it views:

>>> write = write_through(torch.ops.aten.slice.Tensor, (x, 0, 2, 4), {}, None)
>>> write(x, new_rows)          # x with its rows 2 and 3 replaced
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._torch.ops import OpOverload, overload_name, packet_name, schema_of
from ..notation.build import dims_text, join, normalized, view_rule
from .call import Args, Call, Kwargs
from .kernel import LocalCall
from .op import Function, Local, Op, Write
from .registry import definitions_in, registry, resolve
from .schema import overload_key, variant_of

aten = torch.ops.aten
define = definitions_in(__name__)

MOVES = "linear 0 ; monotone 0"
"""The clauses of ops that only move elements: sums and averages, maxima and minima pass."""


def write_through(func: OpOverload, args: Args, kwargs: Kwargs, index: int | None) -> Write | None:
    """Return the function that writes a new value of the view `func(*args, **kwargs)` into the tensor that it views.

    `index` chooses among several results. None for view ops whose record has no `put`.
    """
    op = resolve(func)
    return None if op.put is None else op.put({**op.arguments(args, kwargs), RESULT: index})


RESULT = "index of the result"
"""The key under which `put` finds the index of the result that is written; None for an op with one result."""


def to_local_shape(call: LocalCall) -> Tensor:
    """View the local shard in the local shape of the result: `squeeze` itself would drop a dim with one local row."""
    tensor: Tensor = call["self"]
    return tensor.view(call.local_shape())


# ---- copies of views ------------------------------------------------------------------------------------------------


def copy_of(view: Function) -> Function:
    """Return the decomposition of the `_copy` op of a view op: the view, and copies of its results."""

    def copied(*args: object, **kwargs: object) -> object:
        result = view(*args, **kwargs)
        return row_major(result) if isinstance(result, Tensor) else [row_major(each) for each in result]

    def row_major(tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    return copied


def _copied_view(func: OpOverload) -> Op | None:
    """Return the record of `_copy` ops without a rule: the view, copied."""
    name = packet_name(func)
    if not name.endswith("_copy") or variant_of(func) != "functional":
        return None
    packet = getattr(aten, name.removeprefix("aten::").removesuffix("_copy"), None)
    view = getattr(packet, overload_name(func), None)
    if view is None or [a.name for a in schema_of(view).arguments] != [a.name for a in schema_of(func).arguments]:
        return None
    return Op(overload_key(func), decomposition=copy_of(view), file="ops/views.py")


registry.add_pattern(_copied_view)

# ---- reshapes -------------------------------------------------------------------------------------------------------


def infer_size(shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    """Return a size argument with its -1 replaced by the size that fits."""
    known = math.prod(n for n in size if n != -1)
    return tuple((math.prod(shape) // known if known else 0) if n == -1 else n for n in size)


def view(call: Call) -> str:
    """Return the rule: a reshape has a factor where the running products of both shapes agree."""
    shape = call.shape(0)
    return join(view_rule(shape, infer_size(shape, tuple(call.arg("size")))), MOVES)


def view_dtype(call: Call) -> str:
    """Return the rule: the same bytes as another dtype.

    If its size differs, the last dim must be replicated. No Partial passes.
    """
    ndim = call.ndim(0)
    if ndim == 0 or call.tensors[0].dtype.itemsize == call.arg("dtype").itemsize:
        return "x.. -> x.."
    text = dims_text("x", ndim, {ndim - 1: "_"})
    return f"{text} -> {text}"


def squeeze(call: Call) -> str:
    """Return the rule: those of the given dims that have size 1 globally are dropped.

    A shard may have size 1 in other dims, which stay.
    """
    shape = call.shape(0)
    asked = normalized(len(shape), call.arg("dim", None))
    gone = [dim for dim in asked if shape[dim] == 1]
    operand, result = (dims_text("x", len(shape), dict.fromkeys(gone, text)) for text in ("1", ""))
    return join(f"{operand} -> {result}", MOVES)


def unsqueeze(call: Call) -> str:
    """Return the rule: a new dim of size 1."""
    ndim = call.ndim(0)
    names = [f"x{dim}" for dim in range(ndim)]
    at = call.arg("dim") % (ndim + 1)
    return join(f"{' '.join(names)} -> {' '.join((*names[:at], '1', *names[at:]))}", MOVES)


def put_reshaped(given: Kwargs) -> Write:
    """Return the write that reshapes the value to the viewed tensor."""
    return lambda root, value: aten.view.default(value, list(root.shape)) if value.numel() else root


define("aten::view", view, put=put_reshaped)
define("aten::view_copy", view, decomposition=copy_of(aten.view))
define("aten::view.dtype", view_dtype)
define("aten::view_copy.dtype", view_dtype, decomposition=copy_of(aten.view.dtype))
define("aten::_unsafe_view", view)
define("aten::_reshape_alias", view, local=Local(to_local_shape))
define("aten::squeeze", squeeze, local=Local(to_local_shape), put=put_reshaped)
define("aten::unsqueeze", unsqueeze, put=put_reshaped)
define("aten::unsqueeze_copy", unsqueeze, decomposition=copy_of(aten.unsqueeze))

# ---- dims in another order ------------------------------------------------------------------------------------------


def permuted(ndim: int, order: list[int]) -> str:
    """Return the rule of a permutation of dims."""
    return join(f"{dims_text('x', ndim, {})} -> {' '.join(f'x{dim}' for dim in order)}", MOVES)


def permute(call: Call) -> str:
    """Return the rule of `permute`."""
    ndim = call.ndim(0)
    return permuted(ndim, [dim % ndim for dim in call.arg("dims")])


def transpose(call: Call) -> str:
    """Return the rule of `transpose` and `t`."""
    ndim = call.ndim(0)
    order = list(range(ndim))
    if ndim > 1:
        a, b = call.arg("dim0", 0) % ndim, call.arg("dim1", 1) % ndim
        order[a], order[b] = order[b], order[a]
    return permuted(ndim, order)


def put_permuted(given: Kwargs) -> Write:
    """Return the write that permutes the dims of the value back."""
    dims = given["dims"]
    order = [dim % len(dims) for dim in dims]
    return lambda root, value: aten.permute.default(value, [order.index(dim) for dim in range(len(order))])


def put_transposed(given: Kwargs) -> Write:
    """Return the write that transposes the value back."""
    return lambda root, value: aten.transpose.int(value, given["dim0"], given["dim1"])


def put_t(given: Kwargs) -> Write:
    """Return the write that transposes the value back."""
    return lambda root, value: aten.t.default(value)


define("aten::permute", permute, put=put_permuted)
define("aten::permute_copy", permute, decomposition=copy_of(aten.permute))
define("aten::transpose.int", transpose, put=put_transposed)
define("aten::transpose_copy.int", transpose, decomposition=copy_of(aten.transpose.int))
define("aten::t", transpose, put=put_t)
define("aten::t_copy", transpose, decomposition=copy_of(aten.t))

# ---- expanded dims --------------------------------------------------------------------------------------------------


def expand(call: Call) -> str:
    """Return the rule: an expanded dim may be sharded as well: each rank expands to its local size."""
    shape, size = call.shape(0), tuple(call.arg("size"))
    new = len(size) - len(shape)
    operand, result = [], []
    for dim, wanted in enumerate(size):
        if dim < new:
            result.append(f"e{dim}")
        elif shape[dim - new] == 1 and wanted not in (1, -1):
            operand.append("1")
            result.append(f"e{dim}")
        else:
            operand.append(f"x{dim}")
            result.append(f"x{dim}")
    return join(f"{' '.join(operand)} -> {' '.join(result)}", MOVES, f"size=({' '.join(result)})")


def put_expanded(given: Kwargs) -> Write:
    """Return the write of the first index of every expanded dim: along it all elements of the value are equal."""

    def write(root: Tensor, value: Tensor) -> Tensor:
        for _ in range(value.dim() - root.dim()):
            value = aten.select.int(value, 0, 0)
        for dim, size in enumerate(root.shape):
            value = aten.slice.Tensor(value, dim, 0, size)
        return value

    return write


define("aten::expand", expand, put=put_expanded)
define("aten::expand_copy", expand, decomposition=copy_of(aten.expand))

# ---- complex numbers ------------------------------------------------------------------------------------------------
#
# PyTorch keeps a conjugate or a negative as a bit on the tensor. The wrapper of a distributed tensor has no such bit,
# and communication would move the memory without it, so local shards are computed at once.


def conjugate(call: LocalCall) -> Tensor:
    """Return the conjugate as a copy."""
    tensor: Tensor = call["self"]
    return tensor.conj_physical()


def negative(call: LocalCall) -> Tensor:
    """Return the negative as a copy."""
    tensor: Tensor = call["self"]
    return tensor.neg()


define("aten::view_as_real", "x.. -> x.. _ ; linear 0")
define("aten::view_as_real_copy", "x.. -> x.. _ ; linear 0", decomposition=copy_of(aten.view_as_real))
define("aten::view_as_complex", "x.. _ -> x.. ; linear 0")
define("aten::view_as_complex_copy", "x.. _ -> x.. ; linear 0", decomposition=copy_of(aten.view_as_complex))
define("aten::_conj", "x.. -> x.. ; linear 0", local=Local(conjugate, copies=True))
define("aten::_neg_view", "x.. -> x.. ; linear 0", local=Local(negative, copies=True))
