"""PyTorch's own placements, which programs may compare with ours."""

from __future__ import annotations

import sys

_MODULE = "torch.distributed.tensor.placement_types"


def torch_placement(value: object) -> tuple[object, ...] | None:
    """Return the kind and fields of a placement of PyTorch, as `("Shard", dim)`; None for anything else.

    Does not import PyTorch's module: if nothing has, none of its placements exist. Relies on the attributes `dim`,
    `reduce_op` and `split_factor`, and on the private name `_StridedShard`.
    """
    theirs = sys.modules.get(_MODULE)
    kind = type(value)
    if theirs is None or kind.__module__ != _MODULE:
        return None
    if kind is theirs.Replicate:
        return ("Replicate",)
    if kind is theirs.Shard:
        return ("Shard", getattr(value, "dim", None))
    if kind is theirs.Partial:
        return ("Partial", getattr(value, "reduce_op", None))
    if kind is getattr(theirs, "_StridedShard", None):
        return ("InterleavedShard", getattr(value, "dim", None), getattr(value, "split_factor", None))
    return None
