"""Views: the same elements under other dims. Slices and joins along a cut dim are in `kernels.shapes`.

All of them hand Partial operands on: they only move elements.
"""

from __future__ import annotations

import math

from ..notation.build import dims_text, join, normalized, view_rule
from .call import Call
from .op import Source
from .tables import register_table

MOVES = "linear 0 ; monotone 0"


def infer_size(shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    """A size argument with its -1 worked out."""
    known = math.prod(n for n in size if n != -1)
    return tuple((math.prod(shape) // known if known else 0) if n == -1 else n for n in size)


def view(call: Call) -> str:
    """A reshape: factors where the running products of both shapes agree."""
    shape = call.shape(0)
    return join(view_rule(shape, infer_size(shape, tuple(call.arg("size")))), MOVES)


def view_dtype(call: Call) -> str:
    """The same bytes as another dtype: of another size, the last dim is whole. Sums of bytes mean nothing."""
    ndim = call.ndim(0)
    if ndim == 0 or call.tensors[0].dtype.itemsize == call.arg("dtype").itemsize:
        return "x.. -> x.."
    text = dims_text("x", ndim, {ndim - 1: "_"})
    return f"{text} -> {text}"


def permuted(ndim: int, order: list[int]) -> str:
    """The rule of a permutation of dims."""
    return join(f"{dims_text('x', ndim, {})} -> {' '.join(f'x{dim}' for dim in order)}", MOVES)


def permute(call: Call) -> str:
    """`permute`."""
    ndim = call.ndim(0)
    return permuted(ndim, [dim % ndim for dim in call.arg("dims")])


def transpose(call: Call) -> str:
    """`transpose` of two dims, and `t`."""
    ndim = call.ndim(0)
    order = list(range(ndim))
    if ndim > 1:
        a, b = call.arg("dim0", 0) % ndim, call.arg("dim1", 1) % ndim
        order[a], order[b] = order[b], order[a]
    return permuted(ndim, order)


def expand(call: Call) -> str:
    """A dim that is expanded may be cut as well: each rank expands to its own part."""
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


def squeeze(call: Call) -> str:
    """The dims of size 1 that are asked for go; on a rank others may have that size, too, and stay."""
    shape = call.shape(0)
    asked = normalized(len(shape), call.arg("dim", None))
    gone = [dim for dim in asked if shape[dim] == 1]
    operand, result = (dims_text("x", len(shape), dict.fromkeys(gone, text)) for text in ("1", ""))
    return join(f"{operand} -> {result}", MOVES)


def unsqueeze(call: Call) -> str:
    """A new dim of size 1."""
    ndim = call.ndim(0)
    names = [f"x{dim}" for dim in range(ndim)]
    at = call.arg("dim") % (ndim + 1)
    return join(f"{' '.join(names)} -> {' '.join((*names[:at], '1', *names[at:]))}", MOVES)


def diagonal(call: Call) -> str:
    """Two dims, whole, become one at the end."""
    ndim = call.ndim(0)
    pair = [call.arg("dim1") % ndim, call.arg("dim2") % ndim]
    operand, result = (dims_text("x", ndim, dict.fromkeys(pair, text)) for text in ("_", ""))
    return join(f"{operand} -> {result} _", MOVES)


def unfold(call: Call) -> str:
    """Windows along a dim, which is whole: a new dim at the end holds them."""
    ndim = call.ndim(0)
    text = dims_text("x", ndim, {call.arg("dimension") % ndim: "_"} if ndim else {})
    return join(f"{text} -> {text if ndim else ''} _", MOVES)


def as_strided(call: Call) -> str:
    """Any view of memory needs the whole, unless it is the tensor itself."""
    meta, size, stride = call.tensors[0], tuple(call.arg("size")), tuple(call.arg("stride"))
    if size == tuple(meta.shape) and stride == tuple(meta.stride) and not call.arg("storage_offset"):
        return f"x.. -> x.. ; {MOVES} ; size=(x..)"
    return join(f"[x..] -> {' '.join('_' for _ in size)}", MOVES)


_COPIED = (
    "view",
    "permute",
    "transpose.int",
    "t",
    "expand",
    "unsqueeze",
    "view_as_real",
    "view_as_complex",
    "diagonal",
)

_VIEWS: dict[str, Source] = {
    "aten::view": view,
    "aten::view.dtype": view_dtype,
    "aten::_unsafe_view": view,
    "aten::_reshape_alias": view,
    "aten::permute": permute,
    "aten::transpose.int": transpose,
    "aten::t": transpose,
    "aten::expand": expand,
    "aten::squeeze": squeeze,
    "aten::unsqueeze": unsqueeze,
    "aten::view_as_real": "x.. -> x.. _ ; linear 0",
    "aten::view_as_complex": "x.. _ -> x.. ; linear 0",
    "aten::_conj": "x.. -> x.. ; linear 0",
    "aten::_neg_view": "x.. -> x.. ; linear 0",
    "aten::diagonal": diagonal,
    "aten::unfold": unfold,
    "aten::as_strided": as_strided,
}

register_table(_VIEWS)
register_table(
    {f"aten::{op.replace('.', '_copy.') if '.' in op else op + '_copy'}": _VIEWS[f"aten::{op}"] for op in _COPIED}
)
