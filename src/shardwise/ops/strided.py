"""Diagonals, windows and other views by strides, and their gradients: the dims that they mix must be replicated."""

from __future__ import annotations

import torch
from torch import Tensor

from ..notation.build import dims_text, join
from .call import Call, Kwargs
from .kernel import LocalCall
from .op import Local, Write
from .registry import definitions_in
from .views import MOVES, copy_of

aten = torch.ops.aten
define = definitions_in(__name__)

# ---- diagonals ------------------------------------------------------------------------------------------------------


def _pair(call: Call, ndim: int) -> list[int]:
    return [call.arg("dim1") % ndim, call.arg("dim2") % ndim]


def diagonal(call: Call) -> str:
    """Return the rule: two dims become one at the end."""
    ndim = call.ndim(0)
    operand, result = (dims_text("x", ndim, dict.fromkeys(_pair(call, ndim), text)) for text in ("_", ""))
    return join(f"{operand} -> {result} _", MOVES)


def diagonal_backward(call: Call) -> str:
    """Return the rule: the last dim becomes two, with zeros around the diagonal."""
    ndim = len(tuple(call.arg("input_sizes")))
    operand, result = (dims_text("x", ndim, dict.fromkeys(_pair(call, ndim), text)) for text in ("", "_"))
    return join(f"{operand} _ -> {result}", "linear 0", f"input_sizes=({result})")


def diagonal_scatter(call: Call) -> str:
    """Return the rule: a diagonal of two dims is replaced."""
    ndim = call.ndim(0)
    result, source = (dims_text("x", ndim, dict.fromkeys(_pair(call, ndim), text)) for text in ("_", ""))
    return join(f"{result}, {source} _ -> {result}", "linear 0+1")


def diag_embed(call: Call) -> str:
    """Return the rule: the last dim becomes the diagonal of two new ones."""
    ndim = call.ndim(0)
    names = [f"x{dim}" for dim in range(ndim - 1)]
    result = list(names)
    for dim in sorted(_pair(call, ndim + 1)):
        result.insert(dim, "_")
    return join(f"{' '.join(names)} _ -> {' '.join(result)}", MOVES)


def put_diagonal(given: Kwargs) -> Write:
    """Return the write that replaces the diagonal by the value."""
    where = [given[name] for name in ("offset", "dim1", "dim2")]
    return lambda root, value: aten.diagonal_scatter.default(root, value, *where)


define("aten::diagonal", diagonal, put=put_diagonal)
define("aten::diagonal_copy", diagonal, decomposition=copy_of(aten.diagonal))
define("aten::diagonal_backward", diagonal_backward)
define("aten::diagonal_scatter", diagonal_scatter, derivative_makes_tensors=True)
define("aten::diag_embed", diag_embed)
define("aten::trace", "_ _ -> ; linear 0", derivative_makes_tensors=True)

# ---- windows --------------------------------------------------------------------------------------------------------


def unfold(call: Call) -> str:
    """Return the rule: windows along a dim; a new dim at the end holds their elements."""
    ndim = call.ndim(0)
    text = dims_text("x", ndim, {call.arg("dimension") % ndim: "_"} if ndim else {})
    return join(f"{text} -> {text if ndim else ''} _", MOVES)


def unfold_backward(call: Call) -> str:
    """Return the rule: the windows of a dim are added up."""
    sizes = tuple(call.arg("input_sizes"))
    if not sizes:
        return "_.. -> ; linear 0"
    text = dims_text("x", len(sizes), {call.arg("dim") % len(sizes): "_"})
    return join(f"{text} _ -> {text}", "linear 0", f"input_sizes=({text})")


define("aten::unfold", unfold)
define("aten::unfold_backward", unfold_backward)
define(("aten::stft", "aten::istft"), makes_tensors=True)

# ---- any strides ----------------------------------------------------------------------------------------------------


def as_strided(call: Call) -> str:
    """Return the rule: the tensor may be sharded if size, strides and offset are its own.

    Any other view needs it replicated.
    """
    meta, size, stride = call.tensors[0], tuple(call.arg("size")), tuple(call.arg("stride"))
    if size == tuple(meta.shape) and stride == tuple(meta.stride) and not call.arg("storage_offset"):
        return f"x.. -> x.. ; {MOVES} ; size=(x..)"
    return join(f"[x..] -> {' '.join('_' for _ in size)}", MOVES)


def local_as_strided(call: LocalCall) -> Tensor:
    """View a sharded tensor unchanged; a replicated one by the global strides, which its local memory has."""
    tensor: Tensor = call["self"]
    if any(factor.axes for dim in call.given[0].dims for factor in dim):
        return tensor.view(tensor.shape)
    offset = tensor.storage_offset() + (call["storage_offset"] or 0)
    return tensor.as_strided(call["size"], call["stride"], offset)


def local_as_strided_scatter(call: LocalCall) -> Tensor:
    """Run the op with the offset of the local tensor, which may begin anywhere in its storage, added."""
    return call.run(storage_offset=call["self"].storage_offset() + (call["storage_offset"] or 0))


def put_strided(given: Kwargs) -> Write:
    """Return the write that replaces the memory which the view covers by the value."""
    where = [given[name] for name in ("size", "stride", "storage_offset")]
    return lambda root, value: aten.as_strided_scatter.default(root, value, *where)


define(
    "aten::as_strided",
    as_strided,
    local=Local(local_as_strided),
    put=put_strided,
    derivative_makes_tensors=True,
    addresses_storage=True,
)
define("aten::as_strided_copy", decomposition=copy_of(aten.as_strided), derivative_makes_tensors=True)
define(
    "aten::as_strided_scatter",
    "[x..], [y..] -> [x..] ; linear 0+1",
    local=Local(local_as_strided_scatter),
    addresses_storage=True,
)
