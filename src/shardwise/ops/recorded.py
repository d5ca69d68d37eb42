"""Ops in recordings on local tensors: which start collectives, read values, share memory, or change nothing."""

from __future__ import annotations

import torch

from .._torch import collectives

aten = torch.ops.aten

STARTS = frozenset(
    [
        *(collectives.all_gather, collectives.all_reduce, collectives.all_reduce_coalesced),
        *(collectives.reduce_scatter, collectives.all_to_all, collectives.broadcast),
    ]
)
"""Ops that start a collective."""
READS_VALUES = frozenset(
    [aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.item.default]
)
"""Ops that return a value of a tensor to Python."""
READING_METHODS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__")
)
"""Methods of Tensor that return values to Python, some of them without calling an op."""
SHARES_MEMORY = frozenset([aten._unsafe_view.default, collectives.WAIT])
"""Ops whose result shares the memory of the first argument, although their schemas do not say so."""
OTHER_NAMES = frozenset([aten.detach.default, aten.alias.default, aten.lift_fresh.default])
"""Ops that return an alias of their argument."""
RESHAPES = frozenset([aten.view.default, aten._unsafe_view.default, aten.reshape.default])
"""Ops that can give a contiguous tensor any shape."""
UNDONE_BY_THEMSELVES = frozenset([aten.t.default])
"""Views that are their own inverse."""
MAY_CHANGE_NOTHING = RESHAPES | {aten.expand.default, aten.permute.default, aten.transpose.int}
"""Views that may have the shape and strides of what they view."""
COPIES = frozenset([aten.clone.default])
"""Ops whose result is a copy of their first argument."""
CHANGES_SHAPE = frozenset(
    getattr(aten, name).default
    for name in ("t_", "transpose_", "squeeze_", "unsqueeze_", "resize_", "as_strided_", "swapaxes_", "set_")
    if hasattr(getattr(aten, name, None), "default")
)
"""Ops that change the shape of a tensor in place. Its aliases keep their shapes."""
