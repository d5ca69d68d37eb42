"""Slices, joins, rolls and pads along a cut dim: only the rows that a rank lacks move.

The result is cut as `torch.chunk` cuts its size, so it is balanced again; `Fetch` brings each rank its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..notation import dims_text
from ..notation.build import join
from ..sharding.layout import Run
from .call import Call
from .kernel import Cut, Fetch, Kernel, KernelRun, LocalCall
from .tables import LOCAL, register
from .views import MOVES

# ---- local views that only need their shape -----------------------------------------------------------------------


def to_local_shape(call: LocalCall) -> Tensor:
    """A view whose dims go by the whole tensor: a rank may hold one row of a dim that has more."""
    tensor: Tensor = call["self"]
    return tensor.view(call.local_shape())


def as_strided(call: LocalCall) -> Tensor:
    """The rule lets only the tensor itself be cut; otherwise local memory is laid out as the whole."""
    tensor: Tensor = call["self"]
    if any(factor.axes for dim in call.given[0].dims for factor in dim):
        return tensor.view(tensor.shape)
    offset = tensor.storage_offset() + (call["storage_offset"] or 0)
    return tensor.as_strided(call["size"], call["stride"], offset)


def new_empty_strided(call: LocalCall) -> Tensor:
    """Local memory with its dims in the same order, without gaps."""
    shape, stride = call.local_shape(), call["stride"]
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    made = call["self"].new_empty([shape[dim] for dim in order], dtype=call.dtypes[0], device=call["device"])
    return made.permute([order.index(dim) for dim in range(len(shape))])


def triangle(call: LocalCall) -> Tensor:
    """A triangle of this rank's block: the diagonal is where rows and columns of the whole meet."""
    tensor: Tensor = call["self"]
    rows, columns = call.layouts[0].runs(call.at)[-2:]
    if len(rows) == len(columns) == 1:
        return call.run(diagonal=call["diagonal"] + rows[0][0] - columns[0][0])
    i, j = (torch.tensor([n for run in runs for n in range(*run)], dtype=torch.long) for runs in (rows, columns))
    distance = (j - i[:, None] - call["diagonal"]).to(tensor.device)
    kept = distance <= 0 if call.func._schema.name.startswith("aten::tril") else distance >= 0
    if call.func._schema.name.endswith("_"):
        return tensor.masked_fill_(~kept, 0)
    return tensor.masked_fill(~kept, 0)


LOCAL.update(
    {
        "aten::squeeze": to_local_shape,
        "aten::_reshape_alias": to_local_shape,
        "aten::as_strided": as_strided,
        "aten::new_empty_strided": new_empty_strided,
        "aten::tril": triangle,
        "aten::triu": triangle,
    }
)

# ---- slices -------------------------------------------------------------------------------------------------------


class Slice:
    """The rows start, start + step, ... of a dim, and which of them lie in a range of it."""

    def __init__(self, call: LocalCall | Call, size: int) -> None:
        arguments = call.arguments
        bounds = slice(arguments.get("start"), arguments.get("end"), arguments.get("step", 1))
        self.start, stop, self.step = bounds.indices(size)
        self.rows = len(range(self.start, stop, self.step))
        self.whole = self.rows == size

    def within(self, held: Run) -> Run:
        """The rows of the slice, counted from its first, whose sources are in this range."""
        first, last = (-((self.start - edge) // self.step) for edge in held)
        first = min(max(first, 0), self.rows)
        return first, min(max(last, first), self.rows)

    def of(self, tensor: Tensor, dim: int, held: Run) -> Tensor:
        """The rows of the slice in a tensor that holds this range: a view."""
        first, last = self.within(held)
        begin = self.start + first * self.step - held[0]
        end = begin + (last - first - 1) * self.step + 1 if last > first else begin
        index = [slice(None)] * dim + [slice(begin, end, self.step)]
        return tensor[tuple(index)]


def slice_rows(call: LocalCall, cut: Cut) -> KernelRun:
    """`slice`: each rank slices what it has, then the slice is balanced."""
    dim, rows = _dim(call), Slice(call, cut.size)
    local = rows.of(call["self"], dim, cut.bounds[cut.piece])
    held = [rows.within(bounds) for bounds in cut.bounds]
    return (yield Fetch(local, dim, held, cut.of(rows.rows).bounds))


def slice_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """The rows of the gradient go to where they were taken from."""
    dim = _dim(call)
    size = call.shapes[0][dim]
    rows, target = Slice(call, size), cut.of(size)
    wanted = [rows.within(bounds) for bounds in target.bounds]
    local = yield Fetch(call["grad_output"], dim, cut.bounds, wanted)
    result = local.new_zeros(call.local_shape())
    rows.of(result, dim, target.bounds[target.piece]).copy_(local)
    return result


def slice_scatter(call: LocalCall, cut: Cut) -> KernelRun:
    """A slice is replaced by the rows of another tensor."""
    dim, rows = _dim(call), Slice(call, cut.size)
    wanted = [rows.within(bounds) for bounds in cut.bounds]
    local = yield Fetch(call["src"], dim, cut.of(rows.rows).bounds, wanted)
    result = call["self"].clone()
    rows.of(result, dim, cut.bounds[cut.piece]).copy_(local)
    return result


def slice_rule(call: Call) -> str:
    """A slice that takes all is local; another has a kernel along its dim."""
    ndim, dim = call.ndim(0), call.arg("dim") % call.ndim(0)
    if Slice(call, call.shape(0)[dim]).whole:
        return f"x.. -> x.. ; {MOVES}"
    text = dims_text("x", ndim, {dim: "k"})
    return join(f"{text} -> {text}", MOVES, "kernel k")


def slice_backward_rule(call: Call) -> str:
    """The size of the sliced dim stays as it is: the kernel makes a rank's part."""
    ndim = call.ndim(0)
    dim = call.arg("dim") % ndim
    text, sizes = (dims_text("x", ndim, {dim: name}) for name in ("k", "_"))
    return join(f"{text} -> {text}", "linear 0", f"input_sizes=({sizes})", "kernel k")


def slice_scatter_rule(call: Call) -> str:
    """Both tensors are cut along the dim, each by its own size."""
    ndim, dim = call.ndim(0), call.arg("dim") % call.ndim(0)
    text = dims_text("x", ndim, {dim: "k"})
    return join(f"{text}, {text} -> {text}", "linear 0+1", "kernel k")


# ---- one row ------------------------------------------------------------------------------------------------------


def silent(local: Callable[[LocalCall, Cut], Any]) -> Callable[[LocalCall, Cut], KernelRun]:
    """A kernel that needs no communication."""

    def run(call: LocalCall, cut: Cut) -> KernelRun:
        return local(call, cut)
        yield

    return run


def _row(tensor: Tensor, dim: int, index: int, cut: Cut) -> Tensor:
    """A row, where it is; zeros elsewhere."""
    if cut.start <= index < cut.stop:
        return tensor.select(dim, index - cut.start).clone(memory_format=torch.contiguous_format)
    shape = list(tensor.shape)
    del shape[dim]
    return tensor.new_zeros(shape)


@silent
def select(call: LocalCall, cut: Cut) -> Tensor:
    """The rank that has the row gives it: a sum over ranks."""
    return _row(call["self"], _dim(call), call["index"] % cut.size, cut)


@silent
def unbind(call: LocalCall, cut: Cut) -> list[Tensor]:
    """Every row, as `select` gives it."""
    return [_row(call["self"], _dim(call), index, cut) for index in range(cut.size)]


@silent
def select_backward(call: LocalCall, cut: Cut) -> Tensor:
    """The rank that has the row takes the gradient."""
    result = call["grad_output"].new_zeros(call.local_shape())
    index = call["index"] % cut.size
    if cut.start <= index < cut.stop:
        result.select(call.out_dims[0], index - cut.start).copy_(call["grad_output"])
    return result


@silent
def select_scatter(call: LocalCall, cut: Cut) -> Tensor:
    """The rank that has the row replaces it."""
    result = call["self"].clone()
    index = call["index"] % cut.size
    if cut.start <= index < cut.stop:
        result.select(_dim(call), index - cut.start).copy_(call["src"])
    return result


def row_rule(result: str) -> Callable[[Call], str]:
    """The rule of an op on one row of a dim: `{}` in the result stands for the dims without it."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        dim = call.arg("dim") % ndim
        operand, rest = (dims_text("x", ndim, {dim: name}) for name in ("k", ""))
        return join(f"{operand} -> {result.replace('rest', rest)}", MOVES, "kernel k")

    return rule


def select_backward_rule(call: Call) -> str:
    """The gradient of a row, in zeros."""
    sizes = tuple(call.arg("input_sizes"))
    dim = call.arg("dim") % len(sizes)
    operand, result = (dims_text("x", len(sizes), {dim: name}) for name in ("", "k"))
    return join(f"{operand} -> {result}", "linear 0", f"input_sizes=({result})", "kernel k")


def select_scatter_rule(call: Call) -> str:
    """A row is replaced."""
    ndim = call.ndim(0)
    dim = call.arg("dim") % ndim
    operand, source = (dims_text("x", ndim, {dim: name}) for name in ("k", ""))
    return join(f"{operand}, {source} -> {operand}", "linear 0+1", "kernel k")


# ---- splits and joins ---------------------------------------------------------------------------------------------


def split(call: LocalCall, cut: Cut) -> KernelRun:
    """Every result is balanced; all their rows travel together."""
    dim = _dim(call)
    sizes = [shape[dim] for shape in call.shapes]
    starts = _starts(sizes)
    wanted = [
        [(start + low, start + high) for start, (low, high) in zip(starts, bounds, strict=True)]
        for bounds in zip(*(cut.of(size).bounds for size in sizes), strict=True)
    ]
    rows = yield Fetch(call["self"], dim, cut.bounds, wanted)
    parts = rows.split([stop - start for start, stop in wanted[cut.piece]], dim)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def cat(call: LocalCall, cut: Cut) -> KernelRun:
    """The parts of all operands, as rows of the result, which are then balanced."""
    dim = _dim(call)
    sizes = [layout.shape[dim] for layout in call.given]
    starts = _starts(sizes)
    held = [
        [(start + low, start + high) for start, (low, high) in zip(starts, bounds, strict=True)]
        for bounds in zip(*(cut.of(size).bounds for size in sizes), strict=True)
    ]
    return (yield Fetch(torch.cat(call["tensors"], dim), dim, held, cut.of(sum(sizes)).bounds))


def split_rule(call: Call) -> str:
    """Parts of a dim, each cut by its own size."""
    text = dims_text("x", call.ndim(0), {call.arg("dim") % call.ndim(0): "k"})
    return join(f"{text} -> {{{text}}}", MOVES, "kernel k")


def cat_rule(call: Call) -> str | None:
    """Tensors joined along a dim, each cut by its own size."""
    ndims = {len(tensor.shape) for tensor in call.tensors[0]}
    if len(ndims) > 1:
        return None  # an empty tensor of one dim may be joined with any others, by an old custom
    ndim = ndims.pop()
    text = dims_text("x", ndim, {call.arg("dim") % ndim: "k"})
    return join(f"{{{text}}} -> {text}", MOVES, "kernel k")


# ---- rolls, flips, pads -------------------------------------------------------------------------------------------


def roll(call: LocalCall, cut: Cut) -> KernelRun:
    """A rank's part of the rolled dim is one run of rows, or two where it goes over the end."""
    dim, ndim = _dim(call), call["self"].dim()
    pairs = [(by, axis % ndim) for by, axis in zip(_list(call["shifts"]), _list(call["dims"]), strict=True)]
    by = sum(shift for shift, axis in pairs if axis == dim)
    local = call["self"]
    others = [(shift, axis) for shift, axis in pairs if axis != dim]
    if others and local.numel():
        local = local.roll(*map(list, zip(*others, strict=True)))
    wanted = []
    for start, stop in cut.bounds:
        first = (start - by) % max(1, cut.size)
        last = first + stop - start
        wanted.append([(first, min(last, cut.size)), (0, last - cut.size)])
    return (yield Fetch(local, dim, cut.bounds, wanted))


def flip(call: LocalCall, cut: Cut) -> KernelRun:
    """The rows from the other end."""
    dim = _dim(call)
    wanted = [(cut.size - stop, cut.size - start) for start, stop in cut.bounds]
    rows = yield Fetch(call["self"], dim, cut.bounds, wanted)
    return rows.flip(call["dims"])


def pad(call: LocalCall, cut: Cut) -> KernelRun:
    """A rank's part of the padded dim: rows of the tensor, and padding where it reaches over the ends."""
    dim, pads = _dim(call), list(call["pad"])
    at = 2 * (call["self"].dim() - 1 - dim)
    target = cut.of(call.shapes[0][dim])
    shifted = [(start - pads[at], stop - pads[at]) for start, stop in target.bounds]
    wanted = [_clipped(run, cut.size) for run in shifted]
    rows = yield Fetch(call["self"], dim, cut.bounds, wanted)
    (low, high), (first, last) = shifted[cut.piece], wanted[cut.piece]
    pads[at : at + 2] = (first - low, high - last) if last > first else (high - low, 0)
    return torch.ops.aten.constant_pad_nd.default(rows, pads, call["value"])


def _clipped(run: Run, size: int) -> Run:
    low, high = (min(max(edge, 0), size) for edge in run)
    return (low, high) if high > low else (0, 0)


def along_dims(argument: str) -> Callable[[Call], str]:
    """The rule of an op along several dims, any one of which may be cut with the kernel."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        dims = sorted({dim % ndim for dim in _list(call.arg(argument))}) if ndim else []
        if not dims and argument == "dims" and call.op._schema.name.startswith("aten::roll"):
            # Without dims the tensor is rolled as if it were flat.
            text = dims_text("x", ndim, dict.fromkeys(range(ndim), "_"))
            return join(f"{text} -> {text}", MOVES)
        text = dims_text("x", ndim, {dim: f"k{dim}" for dim in dims})
        kernels = ", ".join(f"k{dim}" for dim in dims)
        return join(f"{text} -> {text}", MOVES, f"kernel {kernels}" if dims else "")

    return rule


def pad_rule(call: Call) -> str:
    """Dims that are padded have a kernel. Padding by zeros is linear."""
    ndim, pads = call.ndim(0), list(call.arg("pad"))
    padded = [ndim - 1 - i // 2 for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]]
    text = dims_text("x", ndim, {dim: f"k{dim}" for dim in padded})
    kernels = ", ".join(f"k{dim}" for dim in sorted(padded))
    linear = "linear 0" if call.arg("value", 0) == 0 else ""
    return join(f"{text} -> {text}", linear, f"kernel {kernels}" if padded else "")


# ---- small parts --------------------------------------------------------------------------------------------------


def _dim(call: LocalCall) -> int:
    dim = next(dim for dim in call.dims if dim is not None)
    return dim


def _list(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts


for _name in ("slice", "slice_copy"):
    register(f"aten::{_name}", slice_rule, {"k": Kernel(slice_rows)})
register("aten::slice_backward", slice_backward_rule, {"k": Kernel(slice_backward)})
register("aten::slice_scatter", slice_scatter_rule, {"k": Kernel(slice_scatter)})
for _name in ("select.int", "select_copy.int"):
    register(f"aten::{_name}", row_rule("rest"), {"k": Kernel(select, 0, 0.0)})
register("aten::unbind.int", row_rule("{rest}"), {"k": Kernel(unbind, 0, 0.0)})
register("aten::select_backward", select_backward_rule, {"k": Kernel(select_backward, 0, 0.0)})
register("aten::select_scatter", select_scatter_rule, {"k": Kernel(select_scatter, 0, 0.0)})
for _name in ("split.Tensor", "split_with_sizes", "unsafe_split.Tensor", "unsafe_split_with_sizes"):
    register(f"aten::{_name}", split_rule, {"k": Kernel(split)})
register("aten::cat", cat_rule, {"k": Kernel(cat)})
register("aten::roll", along_dims("dims"), {"k": Kernel(roll)})
register("aten::flip", along_dims("dims"), {"k": Kernel(flip)})
register("aten::constant_pad_nd", pad_rule, {"k": Kernel(pad)})
