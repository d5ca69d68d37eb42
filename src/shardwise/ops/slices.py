"""Slices, single rows and splits along a sharded dim: only the rows that a rank lacks move.

The result is sharded evenly again, as `torch.chunk` divides its size; `Fetch` brings each rank its rows. Interleaved
dims that are sliced at the edges of their blocks stay interleaved, and nothing moves (`blocks`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .._torch.above_autograd import Keys
from .._torch.ops import OpOverload
from ..notation.build import dims_text, join
from ..sharding.layout import Run
from . import blocks
from .above_autograd import where_distributed
from .call import Call, Kwargs
from .kernel import FactorShard, Fetch, Kernel, KernelRun, LocalCall, no_summand, without_communication
from .op import Write
from .registry import definitions_in
from .views import MOVES, RESULT, copy_of

aten = torch.ops.aten
define = definitions_in(__name__)


def starts_of(sizes: list[int]) -> list[int]:
    """Return the start of each of several consecutive ranges: `[2, 3, 4]` -> `[0, 2, 5]`."""
    return list(itertools.accumulate(sizes, initial=0))[:-1]


# ---- slices ---------------------------------------------------------------------------------------------------------


class Slice:
    """The rows start, start + step, ... of a dim, and which of them lie in a range of it."""

    def __init__(self, call: LocalCall | Call, size: int) -> None:
        arguments = call.arguments
        bounds = slice(arguments.get("start"), arguments.get("end"), arguments.get("step", 1))
        self.start, stop, self.step = bounds.indices(size)
        self.rows = len(range(self.start, stop, self.step))
        self.is_all = self.rows == size

    def within(self, held: Run) -> Run:
        """Return which rows of the slice, counted from its first one, are rows of the dim in this range."""
        first, last = (-((self.start - edge) // self.step) for edge in held)
        first = min(max(first, 0), self.rows)
        return first, min(max(last, first), self.rows)

    def of(self, tensor: Tensor, dim: int, held: Run) -> Tensor:
        """Return a view of the rows of the slice in a tensor that holds this range of the dim."""
        first, last = self.within(held)
        begin = self.start + first * self.step - held[0]
        end = begin + (last - first - 1) * self.step + 1 if last > first else begin
        index = [slice(None)] * dim + [slice(begin, end, self.step)]
        return tensor[tuple(index)]


def slice_rule(call: Call) -> str:
    """Return the rule: a slice of all rows is local; any other has a kernel along its dim."""
    ndim, dim = call.ndim(0), call.arg("dim") % call.ndim(0)
    if Slice(call, call.shape(0)[dim]).is_all:
        return f"x.. -> x.. ; {MOVES}"
    text = dims_text("x", ndim, {dim: "k"})
    return join(f"{text} -> {text}", MOVES, "kernel k")


def slice_rows(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Slice each shard, then exchange rows so that the slice is sharded evenly."""
    dim, rows = call.sharded_dim, Slice(call, shard.size)
    local = rows.of(call["self"], dim, shard.bounds[shard.piece])
    held = [rows.within(bounds) for bounds in shard.bounds]
    return (yield Fetch(local, dim, held, shard.of(rows.rows).bounds))


def put_slice(given: Kwargs) -> Write:
    """Return the write that replaces the rows of the slice by the value."""
    dim, start, end, step = (given[name] for name in ("dim", "start", "end", "step"))
    return lambda root, value: aten.slice_scatter.default(root, value, dim, start, end, step)


def slice_backward_rule(call: Call) -> str:
    """Return the rule: rows of zeros around the gradient.

    The kernel reads the global size of the sliced dim, so that entry of `input_sizes` is not localised.
    """
    ndim = call.ndim(0)
    dim = call.arg("dim") % ndim
    text, sizes = (dims_text("x", ndim, {dim: name}) for name in ("k", "_"))
    return join(f"{text} -> {text}", "linear 0", f"input_sizes=({sizes})", "kernel k")


def slice_backward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Put the rows of the gradient where the slice took them from; all other rows are zero."""
    dim = call.sharded_dim
    size = call.shapes[0][dim]
    rows, target = Slice(call, size), shard.of(size)
    wanted = [rows.within(bounds) for bounds in target.bounds]
    local = yield Fetch(call["grad_output"], dim, shard.bounds, wanted)
    result = local.new_zeros(call.local_shape())
    rows.of(result, dim, target.bounds[target.piece]).copy_(local)
    return result


def slice_scatter_rule(call: Call) -> str:
    """Return the rule: both tensors are sharded along the dim, each by its own size."""
    ndim, dim = call.ndim(0), call.arg("dim") % call.ndim(0)
    start, stop, step = slice(call.arg("start"), call.arg("end"), call.arg("step")).indices(call.shape(0)[dim])
    if call.shape(1)[dim] != len(range(start, stop, step)):
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(call.shape(1))}, "
            f"of the slice in dim {dim}: {len(range(start, stop, step))}"
        )
    text = dims_text("x", ndim, {dim: "k"})
    return join(f"{text}, {text} -> {text}", "linear 0+1", "kernel k")


def slice_scatter(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Replace the rows of a slice by those of another tensor."""
    dim, rows = call.sharded_dim, Slice(call, shard.size)
    wanted = [rows.within(bounds) for bounds in shard.bounds]
    local = yield Fetch(call["src"], dim, shard.of(rows.rows).bounds, wanted)
    result = call["self"].clone()
    rows.of(result, dim, shard.bounds[shard.piece]).copy_(local)
    return result


_slice = {"k": Kernel(slice_rows), **blocks.SLICE}
_copied = copy_of(aten.slice.Tensor)
define("aten::slice", slice_rule, layout_rule=blocks.slice_by_blocks, kernels=_slice, put=put_slice)
define("aten::slice_copy", slice_rule, layout_rule=blocks.slice_by_blocks, kernels=_slice, decomposition=_copied)
define(
    "aten::slice_backward",
    slice_backward_rule,
    layout_rule=blocks.slice_backward_by_blocks,
    kernels={"k": Kernel(slice_backward), **blocks.SLICE_BACKWARD},
)
define("aten::slice_scatter", slice_scatter_rule, kernels={"k": Kernel(slice_scatter)}, derivative_makes_tensors=True)
define("aten::slice_inverse", derivative_makes_tensors=True)

# ---- one row --------------------------------------------------------------------------------------------------------


def row_rule(result: str) -> Callable[[Call], str]:
    """Return the rule of an op on one row of a dim; in `result`, the word `rest` stands for all other dims."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        dim = call.arg("dim") % ndim
        operand, rest = (dims_text("x", ndim, {dim: name}) for name in ("k", ""))
        return join(f"{operand} -> {result.replace('rest', rest)}", MOVES, "kernel k")

    return rule


def _row(tensor: Tensor, dim: int, index: int, shard: FactorShard) -> Tensor:
    """Return the row at this global index on the rank that holds it; on the others zeros that change no sum."""
    if shard.start <= index < shard.stop:
        return tensor.select(dim, index - shard.start).clone(memory_format=torch.contiguous_format)
    shape = list(tensor.shape)
    del shape[dim]
    return no_summand(tensor, shape)


@without_communication
def select(call: LocalCall, shard: FactorShard) -> Tensor:
    """Return the row as a partial sum, to which only the rank that holds it adds."""
    return _row(call["self"], call.sharded_dim, call["index"] % shard.size, shard)


@without_communication
def unbind(call: LocalCall, shard: FactorShard) -> list[Tensor]:
    """Return every row as a partial sum, to which only the rank that holds it adds."""
    return [_row(call["self"], call.sharded_dim, index, shard) for index in range(shard.size)]


def put_row(given: Kwargs) -> Write:
    """Return the write that replaces the row by the value."""
    index = given["index"] if given[RESULT] is None else given[RESULT]
    return lambda root, value: aten.select_scatter.default(root, value, given["dim"], index)


def select_backward_rule(call: Call) -> str:
    """Return the rule: the result has the dim of the row, which the gradient of the row lacks.

    With the kernel that dim may be sharded.
    """
    sizes = tuple(call.arg("input_sizes"))
    dim = call.arg("dim") % len(sizes)
    operand, result = (dims_text("x", len(sizes), {dim: name}) for name in ("", "k"))
    return join(f"{operand} -> {result}", "linear 0", f"input_sizes=({result})", "kernel k")


@without_communication
def select_backward(call: LocalCall, shard: FactorShard) -> Tensor:
    """Return zeros, and the gradient in the row on the rank that holds it."""
    result: Tensor = call["grad_output"].new_zeros(call.local_shape())
    index = call["index"] % shard.size
    if shard.start <= index < shard.stop:
        result.select(call.out_dims[0] or 0, index - shard.start).copy_(call["grad_output"])
    return result


def select_scatter_rule(call: Call) -> str:
    """Return the rule: the source is one row, without the dim along which it replaces a row of the tensor."""
    ndim = call.ndim(0)
    dim = call.arg("dim") % ndim
    operand, source = (dims_text("x", ndim, {dim: name}) for name in ("k", ""))
    return join(f"{operand}, {source} -> {operand}", "linear 0+1", "kernel k")


@without_communication
def select_scatter(call: LocalCall, shard: FactorShard) -> Tensor:
    """Replace the row on the rank that holds it."""
    result: Tensor = call["self"].clone()
    index = call["index"] % shard.size
    if shard.start <= index < shard.stop:
        result.select(call.sharded_dim, index - shard.start).copy_(call["src"])
    return result


_select = {"k": Kernel(select, 0, 0.0)}
define("aten::select.int", row_rule("rest"), kernels=_select, put=put_row)
define("aten::select_copy.int", row_rule("rest"), kernels=_select, decomposition=copy_of(aten.select.int))
define(
    "aten::unbind.int",
    row_rule("{rest}"),
    kernels={"k": Kernel(unbind, 0, 0.0)},
    put=put_row,
    derivative_makes_tensors=True,
)
define("aten::select_backward", select_backward_rule, kernels={"k": Kernel(select_backward, 0, 0.0)})
define(
    "aten::select_scatter",
    select_scatter_rule,
    kernels={"k": Kernel(select_scatter, 0, 0.0)},
    derivative_makes_tensors=True,
)

# ---- splits ---------------------------------------------------------------------------------------------------------


def split_rule(call: Call) -> str:
    """Return the rule: ranges of a dim, each sharded by its own size."""
    text = dims_text("x", call.ndim(0), {call.arg("dim") % call.ndim(0): "k"})
    return join(f"{text} -> {{{text}}}", MOVES, "kernel k")


def split(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Fetch the rows of all results in one exchange; each result is sharded evenly."""
    dim = call.sharded_dim
    sizes = [shape[dim] for shape in call.shapes]
    starts = starts_of(sizes)
    wanted = [
        [(start + low, start + high) for start, (low, high) in zip(starts, bounds, strict=True)]
        for bounds in zip(*(shard.of(size).bounds for size in sizes), strict=True)
    ]
    rows = yield Fetch(call["self"], dim, shard.bounds, wanted)
    parts = rows.split([stop - start for start, stop in wanted[shard.piece]], dim)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def put_split(given: Kwargs) -> Write:
    """Return the write that replaces one range of the dim by the value."""
    index, dim = given[RESULT], given["dim"]
    if "split_sizes" in given:
        starts = list(itertools.accumulate(given["split_sizes"], initial=0))
        start, end = starts[index], starts[index + 1]
    else:
        start, end = index * given["split_size"], (index + 1) * given["split_size"]
    return lambda root, value: aten.slice_scatter.default(root, value, dim, start, end)


_split = {"k": Kernel(split), **blocks.SPLIT}
SPLIT, SPLIT_WITH_SIZES = aten.split.Tensor, aten.split_with_sizes.default
_SPLITS = "aten::split.Tensor", "aten::split_with_sizes"
_UNSAFE = "aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes"
define(
    _SPLITS,
    split_rule,
    layout_rule=blocks.split_by_blocks,
    kernels=_split,
    put=put_split,
    derivative_makes_tensors=True,
)
define(_UNSAFE, split_rule, layout_rule=blocks.split_by_blocks, kernels=_split, derivative_makes_tensors=True)


def _split_at_values(func: OpOverload) -> Callable[..., object]:
    """Return the override of `tensor_split` by a tensor of indices.

    PyTorch's kernel reads the indices from memory, which a distributed tensor lacks.
    """

    def run(keys: Keys, tensor: Tensor, indices: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        if indices.dtype != torch.int64 or indices.dim() > 1 or not tensor.dim():
            like = torch.zeros([1] * indices.dim(), dtype=indices.dtype)
            return torch.tensor_split(torch.empty([1] * tensor.dim()), like, dim)  # raises the error of one device
        return torch.tensor_split(tensor, indices.tolist(), dim)

    return where_distributed(func, run)


define("aten::tensor_split.tensor_indices_or_sections", override=_split_at_values)
