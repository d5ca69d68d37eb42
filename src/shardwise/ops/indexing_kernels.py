"""Looking up and writing rows by index along a cut dim, without communication.

A rank shifts the indices by where its part begins. Looking up, it gives zeros for rows that others have, and the
result is a sum over ranks. Writing, what others have goes to one extra row, which is cut off again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..notation import dims_text
from ..notation.build import join
from .call import Call
from .kernel import Cut, Kernel, LocalCall
from .shapes_kernels import silent
from .tables import register

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def shifted(index: Tensor, cut: Cut, wraps: bool = False) -> tuple[Tensor, Tensor]:
    """Indices into this rank's rows, and where they are within them. `wraps`: negative ones count from the end."""
    if index.device.type == "cpu" and index.numel():
        low, high = index.aminmax()
        if low < (-cut.size if wraps else 0) or high >= cut.size:
            wrong = low if low < 0 else high
            raise IndexError(f"index {int(wrong)} is out of bounds for dimension with size {cut.size}")
    if wraps:
        index = torch.where(index < 0, index + cut.size, index)
    index = index - cut.start
    return index, (index >= 0) & (index < cut.held)


def with_extra_row(tensor: Tensor, dim: int) -> Tensor:
    """The tensor and one row more along a dim."""
    shape = list(tensor.shape)
    shape[dim] = 1
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def kept(hit: Tensor, found: Tensor) -> Tensor:
    """What was found where it was looked for, zeros elsewhere. A product would make NaN of what is infinite."""
    return torch.where(hit, found, found.new_zeros(()))


def functional(call: LocalCall) -> Callable[..., Any]:
    """The op that gives a new tensor, for in-place and `out=` variants."""
    packet = getattr(aten, call.func._schema.name.removeprefix("aten::").removesuffix("_"))
    overload = call.func._overloadname.removesuffix("out").removesuffix("_") or "default"
    op = getattr(packet, overload)

    def run(**changed: Any) -> Any:
        arguments = {**call.arguments, **changed}
        given = op._schema.arguments
        positional = [arguments[argument.name] for argument in given if not argument.kwarg_only]
        return op(*positional, **{a.name: arguments[a.name] for a in given if a.kwarg_only})

    return run


# ---- embedding ----------------------------------------------------------------------------------------------------


@silent
def embedding(call: LocalCall, cut: Cut) -> Tensor:
    """Rows of a table whose rows are cut."""
    weight, (index, hit) = call["weight"], shifted(call["indices"], cut)
    if not cut.held:
        return weight.new_zeros(call.local_shape())
    return kept(hit.unsqueeze(-1), torch.embedding(weight, index.where(hit, 0)))


@silent
def embedding_backward(call: LocalCall, cut: Cut) -> Tensor:
    """Gradients go to the rows that a rank has, all others to an extra row, which is the one that is padding."""
    index, hit = shifted(call["indices"], cut)
    if call["padding_idx"] >= 0:
        hit = hit & (call["indices"] != call["padding_idx"])
    grad, rows = call["grad_output"], cut.held
    index = index.where(hit, rows)
    wide = aten.embedding_dense_backward.default(grad, index, rows + 1, rows, call["scale_grad_by_freq"])
    return wide[:rows]


def embedding_backward_rule(call: Call) -> str:
    """A sum over the looked-up rows, unless it is scaled by how often each of them occurs."""
    rows = "[i..]" if call.arg("scale_grad_by_freq") else "i.."
    return f"{rows} d, {rows} -> v d ; linear 0 ; num_weights=(v) ; kernel v"


# ---- along one dim, by indices for every element ------------------------------------------------------------------


@silent
def gather(call: LocalCall, cut: Cut) -> Tensor:
    """Elements by their index along the cut dim."""
    tensor, (index, hit) = call["self"], shifted(call["index"], cut)
    if not cut.held:
        return tensor.new_zeros(index.shape)
    return kept(hit, tensor.gather(_dim(call), index.where(hit, 0)))


@silent
def scatter(call: LocalCall, cut: Cut) -> Tensor:
    """Elements to their index along the cut dim, in all ways there are to combine them."""
    dim, (index, hit) = _dim(call), shifted(call["index"], cut)
    wide = functional(call)(self=with_extra_row(call["self"], dim), index=index.where(hit, cut.held))
    return wide.narrow(dim, 0, cut.held)


def gather_rule(call: Call) -> str:
    """An index for every element of the result; other dims go together where their sizes agree."""
    ndim = call.ndim(0)
    if ndim == 0 or call.ndim(1) != ndim:  # an index without elements may have any rank
        return "[x..], [i..] -> [i..] ; linear 0"
    table, index = (dims_text("x", ndim, {call.arg("dim") % ndim: name}) for name in ("v", "i"))
    return join(f"{table}, {index} -> {index}", "linear 0", "ragged", "kernel v")


def scatter_rule(call: Call) -> str:
    """An index for every element of the source, or a value for all of them; where they are added, it may be cut."""
    ndim, source = call.ndim(0), len(call.tensors) > 2
    reduce = "sum" if "scatter_add" in call.op._schema.name else call.arg("reduce", None)
    adds = source and reduce in ("sum", "add") and call.arg("include_self", True)
    linear = "linear 0+2" if adds or (source and reduce is None) else ""
    if ndim == 0 or call.ndim(1) != ndim:
        return join(f"[x..], [i..]{', [s..]' if source else ''} -> [x..]", linear)
    table, index = (dims_text("x", ndim, {call.arg("dim") % ndim: name}) for name in ("v", "i" if adds else "[i]"))
    operands = f"{table}, {index}, {index}" if source else f"{table}, {index}"
    return join(f"{operands} -> {table}", linear, "ragged", "kernel v")


def take_rule(call: Call) -> str:
    """Indices into a flat tensor."""
    if call.ndim(0) == 1:
        return "v, i.. -> i.. ; linear 0 ; kernel v"
    return "[x..], i.. -> i.. ; linear 0"


@silent
def take(call: LocalCall, cut: Cut) -> Tensor:
    """Elements of a cut vector."""
    tensor, (index, hit) = call["self"], shifted(call["index"], cut, wraps=True)
    if not cut.held:
        return tensor.new_zeros(index.shape)
    return kept(hit, tensor.take(index.where(hit, 0)))


# ---- along one dim, by indices of rows ----------------------------------------------------------------------------


@silent
def index_select(call: LocalCall, cut: Cut) -> Tensor:
    """Rows by their index along the cut dim."""
    dim, (index, hit) = _dim(call), shifted(call["index"], cut)
    if not cut.held:
        return call["self"].new_zeros(call.local_shape())
    trailing = [1] * (call["self"].dim() - dim - 1)
    return kept(hit.reshape(-1, *trailing), call["self"].index_select(dim, index.where(hit, 0)))


@silent
def index_write(call: LocalCall, cut: Cut) -> Tensor:
    """Rows to their index along the cut dim: `index_add`, `index_copy`, `index_fill`, `index_reduce`."""
    wraps = "index_fill" in call.func._schema.name
    dim, (index, hit) = _dim(call), shifted(call["index"], cut, wraps)
    wide = functional(call)(self=with_extra_row(call["self"], dim), index=index.where(hit, cut.held))
    return wide.narrow(dim, 0, cut.held)


def index_select_rule(call: Call) -> str:
    """Rows of a dim; an index without dims gives a row that keeps its dim."""
    ndim = call.ndim(0)
    if ndim == 0:
        return "[x..], [i..] -> [x..] ; linear 0"
    dim = call.arg("dim") % ndim
    table, result = (dims_text("x", ndim, {dim: name}) for name in ("v", "i" if call.ndim(1) else "1"))
    return join(f"{table}, {'i' if call.ndim(1) else ''} -> {result}", "linear 0", "kernel v")


def row_writes(adds: bool, clauses: str) -> Callable[[Call], str]:
    """The rule of an op that writes rows; where it adds, the rows written may be cut."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        source = len(call.tensors) > 2 and call.tensors[2] is not None
        if ndim == 0 or call.ndim(1) == 0:
            return join(f"[x..], [i..]{', [s..]' if source else ''} -> [x..]", clauses)
        dim = call.arg("dim") % ndim
        rows = "i" if adds and source and call.ndim(2) else "[i]"
        table, written = (dims_text("x", ndim, {dim: name}) for name in ("v", rows))
        operands = [table, rows] + ([written if call.ndim(2) else ""] if source else [])
        return join(f"{', '.join(operands)} -> {table}", clauses, "kernel v")

    return rule


# ---- by index tensors for some dims -------------------------------------------------------------------------------


class Indexed:
    """Which dims of a tensor are indexed, and where the dims of the indices are in the result."""

    def __init__(self, indices: list[Any], ndim: int) -> None:
        self.dims = [dim for dim, index in enumerate(indices) if index is not None]
        self.rank = max((len(index.shape) for index in indices if index is not None), default=0)
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1)) if self.dims else True
        self.at = self.dims[0] if self.dims and adjacent else 0
        self.others = [dim for dim in range(ndim) if dim not in self.dims]

    def covered_by(self, values: tuple[int, ...], indices: list[Any]) -> bool:
        """Whether values have the dims of the indices: those that lack one are added for every index along it."""
        shape = tuple(torch.broadcast_shapes(*(tuple(index.shape) for index in indices if index is not None)))
        end = len(values) - (len(self.others) - self.at)
        return end >= len(shape) and values[end - len(shape) : end] == shape

    def result(self, index: str, mark: str = "") -> str:
        """The dims of the result, or of values that broadcast to it."""
        names = [f"x{dim}{mark}" for dim in self.others]
        return " ".join((*names[: self.at], index, *names[self.at :]))


def index_rule(call: Call) -> str | None:
    """Elements by index tensors that broadcast together. How many a mask selects depends on data."""
    indices = list(call.tensors[1])
    if any(index is not None and index.dtype in _MASKS for index in indices):
        return None
    where = Indexed(indices, call.ndim(0))
    table = dims_text("x", call.ndim(0), {dim: f"v{dim}" for dim in where.dims})
    kernels = ", ".join(f"v{dim}" for dim in where.dims)
    return join(f"{table}, {{i?..}} -> {where.result('i..')}", "linear 0", f"kernel {kernels}" if kernels else "")


def index_put_rule(call: Call) -> str | None:
    """Elements written by index tensors; where they are added up, the indices may be cut."""
    indices, ndim = list(call.tensors[1]), call.ndim(0)
    if any(index is not None and index.dtype in _MASKS for index in indices):
        return _masked(call, indices)
    where = Indexed(indices, ndim)
    rows = "i?.." if call.arg("accumulate") and where.covered_by(call.shape(2), indices) else "[i?..]"
    values = where.result(rows, "?")
    table = dims_text("x", ndim, {dim: f"v{dim}" for dim in where.dims})
    kernels = ", ".join(f"v{dim}" for dim in where.dims)
    clause = f"kernel {kernels}" if kernels else ""
    return join(f"{table}, {{{rows}}}, {values} -> {table}", "linear 0+2", clause)


def _masked(call: Call, indices: list[Any]) -> str | None:
    """One value for all that a mask selects: each rank fills its part."""
    if len(indices) != 1 or any(size != 1 for size in call.shape(2)):
        return None
    return "m.. x.., {m..}, _.. -> m.. x.. ; linear 0+2"


@silent
def index(call: LocalCall, cut: Cut) -> Tensor:
    """Elements of a tensor of which one indexed dim is cut."""
    dim, indices = _dim(call), list(call["indices"])
    where = Indexed(indices, call["self"].dim())
    indices[dim], hit = shifted(indices[dim], cut, wraps=True)
    if not cut.held:
        return call["self"].new_zeros(call.local_shape())
    indices[dim] = indices[dim].where(hit, 0)
    found = aten.index.Tensor(call["self"], indices)
    trailing = found.dim() - where.at - where.rank
    return kept(hit.reshape(*hit.shape, *[1] * trailing), found)


@silent
def index_put(call: LocalCall, cut: Cut) -> Tensor:
    """Elements written to a tensor of which one indexed dim is cut."""
    dim, indices = _dim(call), list(call["indices"])
    indices[dim], hit = shifted(indices[dim], cut, wraps=True)
    indices[dim] = indices[dim].where(hit, cut.held)
    wide = aten.index_put.default(with_extra_row(call["self"], dim), indices, call["values"], call["accumulate"])
    return wide.narrow(dim, 0, cut.held)


def _dim(call: LocalCall) -> int:
    dim = call.dims[0]
    assert dim is not None, "the first operand has the cut dim"
    return dim


# ---- which op is which --------------------------------------------------------------------------------------------


def _free(run: Any) -> dict[str, Kernel]:
    return {"v": Kernel(run, rounds=0, traffic=0.0)}


register("aten::embedding", "v d, i.. -> i.. d ; linear 0 ; kernel v", _free(embedding))
register("aten::embedding_dense_backward", embedding_backward_rule, _free(embedding_backward))
register("aten::gather", gather_rule, _free(gather))
for _name in (
    "scatter.src",
    "scatter.value",
    "scatter.reduce",
    "scatter.value_reduce",
    "scatter_add",
    "scatter_reduce.two",
):
    register(f"aten::{_name}", scatter_rule, _free(scatter))
register("aten::take", take_rule, _free(take))
register("aten::index_select", index_select_rule, _free(index_select))
register("aten::index_add", row_writes(True, "linear 0+2"), _free(index_write))
register("aten::index_copy", row_writes(False, "linear 0+2"), _free(index_write))
register("aten::index_fill", row_writes(False, ""), _free(index_write))
register("aten::index_reduce", row_writes(False, ""), _free(index_write))
for _name in ("index.Tensor", "_unsafe_index.Tensor"):
    register(f"aten::{_name}", index_rule, _free(index))
for _name in ("index_put", "_unsafe_index_put", "_index_put_impl_"):
    register(f"aten::{_name}", index_put_rule, _free(index_put))
