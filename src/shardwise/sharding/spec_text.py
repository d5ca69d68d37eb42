"""A layout as one line of text, such as `f32[8, 16@tp] sum(dp)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Factor, Layout
from .mesh import names_text
from .placement import AnyShard, InterleavedShard, Partial, Placement, ShardOrder

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def spec_text(layout: Layout, dtype: torch.dtype, names: Sequence[str]) -> str:
    """Return one line such as `f32[8, 16@tp] sum(dp)`; an interleaved dim is printed as its factors, `(3 16@tp)`."""

    def factor_text(factor: Factor) -> str:
        size, axes = factor
        return f"{size}@{names_text([names[axis] for axis in axes])}" if axes else str(size)

    dims = []
    for dim in layout.dims:
        texts = [factor_text(factor) for factor in dim]
        dims.append(texts[0] if len(texts) == 1 else f"({' '.join(texts)})")
    dtype_name = DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    partial = "".join(f" {op}({names[axis]})" for axis, op in layout.partial)
    return f"{dtype_name}[{', '.join(dims)}]{partial}"


def placements_text(placements: Sequence[Placement], order: ShardOrder | None = None) -> str:
    """Return placements in PyTorch's short form, with places in the shard order where that is not left to right.

    >>> placements_text([Replicate(), Shard(1), Partial()])
    'RS(1)P(sum)'
    >>> placements_text([Shard(0), Shard(0)], (ShardOrderEntry(0, (1, 0)),))
    'S(0)[1]S(0)[0]'
    """
    places = {}
    for _, axes in order or ():
        if list(axes) != sorted(axes):
            places.update({axis: f"[{place}]" for place, axis in enumerate(axes)})
    return "".join(f"{_short(placement)}{places.get(axis, '')}" for axis, placement in enumerate(placements))


def _short(placement: Placement) -> str:
    if isinstance(placement, InterleavedShard):
        return f"_S({placement.dim}, {placement.blocks})"
    if isinstance(placement, AnyShard):
        return f"S({placement.dim})"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"
