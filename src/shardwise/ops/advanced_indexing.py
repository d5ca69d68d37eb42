"""Indexing by tensors for some dims (`x[i, :, j]`) and by masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch.decompositions import pytorch_decomposition
from ..notation.build import dims_text, join, kernel_clause
from .call import Call
from .indexing import free, kept, shifted, with_extra_row
from .kernel import FactorShard, LocalCall, no_summand, without_communication
from .op import Never
from .registry import definitions_in

aten = torch.ops.aten
define = definitions_in(__name__)
_MASKS = (torch.bool, torch.uint8)


class Indexed:
    """Which dims of a tensor are indexed, and where the dims of the indices are in the result."""

    def __init__(self, indices: Sequence[Tensor | None], ndim: int) -> None:
        self.dims = [dim for dim, index in enumerate(indices) if index is not None]
        self.rank = max((len(index.shape) for index in indices if index is not None), default=0)
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1)) if self.dims else True
        self.at = self.dims[0] if self.dims and adjacent else 0
        self.others = [dim for dim in range(ndim) if dim not in self.dims]

    def covered_by(self, values: tuple[int, ...], indices: Sequence[Tensor | None]) -> bool:
        """Return whether values have all dims of the broadcast indices.

        A value that lacks one is added once per index.
        """
        shape = tuple(torch.broadcast_shapes(*(tuple(index.shape) for index in indices if index is not None)))
        end = len(values) - (len(self.others) - self.at)
        return end >= len(shape) and values[end - len(shape) : end] == shape

    def result(self, index: str, mark: str = "") -> str:
        """Return the pattern of the result, or of values that broadcast to it.

        `index` stands where the indexed dims were.
        """
        names = [f"x{dim}{mark}" for dim in self.others]
        return " ".join((*names[: self.at], index, *names[self.at :]))


# ---- look-ups -------------------------------------------------------------------------------------------------------


def index_rule(call: Call) -> str | None:
    """Return the rule: elements by index tensors that broadcast together.

    Return None for masks, whose number of elements depends on data.
    """
    indices = list(call.tensors[1])
    if any(index is not None and index.dtype in _MASKS for index in indices):
        return None
    where = Indexed(indices, call.ndim(0))
    table = dims_text("x", call.ndim(0), {dim: f"v{dim}" for dim in where.dims})
    clause = kernel_clause([f"v{dim}" for dim in where.dims])
    return join(f"{table}, {{i?..}} -> {where.result('i..')}", "linear 0", clause)


@without_communication
def index(call: LocalCall, shard: FactorShard) -> Tensor:
    """Look up the elements whose index in the sharded dim is on this rank; the others are zeros in a sum."""
    dim, indices = call.sharded_dim, list(call["indices"])
    where = Indexed(indices, call["self"].dim())
    indices[dim], hit = shifted(indices[dim], shard, wraps=True)
    if not shard.held:
        return no_summand(call["self"], call.local_shape())
    indices[dim] = indices[dim].where(hit, 0)
    found = aten.index.Tensor(call["self"], indices)
    trailing = found.dim() - where.at - where.rank
    return kept(hit.reshape(*hit.shape, *[1] * trailing), found)


define(("aten::index.Tensor", "aten::_unsafe_index.Tensor"), index_rule, kernels=free(index), strides="indexed")
define("aten::_unsafe_masked_index", decomposition=pytorch_decomposition(aten._unsafe_masked_index.default))

# ---- writes ---------------------------------------------------------------------------------------------------------


def index_put_rule(call: Call) -> str | None:
    """Return the rule: elements written by index tensors; where they are added up, the indices may be sharded."""
    indices, ndim = list(call.tensors[1]), call.ndim(0)
    if any(index is not None and index.dtype in _MASKS for index in indices):
        return _masked(call, indices)
    where = Indexed(indices, ndim)
    rows = "i?.." if call.arg("accumulate") and where.covered_by(call.shape(2), indices) else "[i?..]"
    values = where.result(rows, "?")
    table = dims_text("x", ndim, {dim: f"v{dim}" for dim in where.dims})
    clause = kernel_clause([f"v{dim}" for dim in where.dims])
    return join(f"{table}, {{{rows}}}, {values} -> {table}", "linear 0+2", clause)


def _masked(call: Call, indices: Sequence[Tensor | None]) -> str | None:
    """Return the rule: one value for all that a mask selects: each rank fills its shard."""
    if len(indices) != 1 or any(size != 1 for size in call.shape(2)):
        return None
    return "m.. x.., {m..}, _.. -> m.. x.. ; linear 0+2"


@without_communication
def index_put(call: LocalCall, shard: FactorShard) -> Tensor:
    """Write the elements whose index in the sharded dim is on this rank; others go to an extra row, dropped."""
    dim, indices = call.sharded_dim, list(call["indices"])
    indices[dim], hit = shifted(indices[dim], shard, wraps=True)
    indices[dim] = indices[dim].where(hit, shard.held)
    wide = aten.index_put.default(with_extra_row(call["self"], dim), indices, call["values"], call["accumulate"])
    return wide.narrow(dim, 0, shard.held)


define(
    ("aten::index_put", "aten::_unsafe_index_put", "aten::_index_put_impl_"),
    index_put_rule,
    kernels=free(index_put),
    derivative_makes_tensors=True,
)
define("aten::_index_put_impl", derivative_makes_tensors=True)
define(
    "aten::_unsafe_masked_index_put_accumulate",
    decomposition=pytorch_decomposition(aten._unsafe_masked_index_put_accumulate.default),
)

# ---- masks ----------------------------------------------------------------------------------------------------------


define("aten::masked_select", Never("the shape of the result depends on data"))
define("aten::masked_scatter", "[x?..], [x?..], [s..] -> [x..] ; linear 0+2")
define("aten::masked_scatter_backward", "[x..], [x?..] -> _.. ; linear 0", derivative_makes_tensors=True)
