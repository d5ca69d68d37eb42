"""Indexing without a kernel: look-ups in whole tables, and ops whose results depend on data.

Ops that look along a dim by indices, which may be cut, are in `kernels.indexing`.
"""

from __future__ import annotations

from ..notation.build import dims_text
from .call import Call
from .tables import register_table


def runs_whole(call: Call) -> None:
    """The shape of the result depends on data."""


def searchsorted(call: Call) -> str:
    """One sorted sequence for all values, or one for each row of values."""
    values = "" if call.tensors[1] is None else "x.."
    if call.ndim(0) == 1:
        return f"[k], {values}, [k] -> {values or '_..'}"
    return "x.. [k], x.. v, x.. [k] -> x.. v"


def _embedding_bag_backward(call: Call) -> str | None:
    """A sparse gradient is made otherwise."""
    return None if call.arg("sparse") else "[b] [d], [i..], [o], [t..], [s..], [m..], [w..] -> _ [d] ; linear 0"


def _embedding_bag(call: Call) -> None:
    """Run whole: what it keeps for the backward has other sizes on the CPU than its metadata say."""
    return None


def segments(call: Call) -> str:
    """Runs of rows along an axis, each reduced by itself: dims before and after the axis are cut."""
    data, ends = _segments(call, call.ndim(0))
    return f"{data}, {ends}, _.., {ends} -> {data}"


def segments_backward(call: Call) -> str:
    """The gradient of these."""
    data, ends = _segments(call, call.ndim(2))
    return f"{data}, {data}, {data}, {ends}, {ends} -> {data} ; linear 0"


def _segments(call: Call, ndim: int) -> tuple[str, str]:
    axis = call.arg("axis") % ndim
    before = " ".join(f"x{d}" for d in range(axis))
    return dims_text("x", ndim, {axis: "_"}), f"{before} _".strip()


register_table(
    {
        "aten::masked_select": runs_whole,
        "aten::masked_scatter": "[x?..], [x?..], [s..] -> [x..] ; linear 0+2",
        "aten::masked_scatter_backward": "[x..], [x?..] -> _.. ; linear 0",
        "aten::put": "[x..], [i..], [s..] -> [x..] ; linear 0+2",
        "aten::bucketize.Tensor": "x.., [k] -> x..",
        "aten::bucketize.Scalar": "[k] -> ",
        "aten::searchsorted.Tensor": searchsorted,
        "aten::segment_reduce": segments,
        "aten::_segment_reduce_backward": segments_backward,
        "aten::_embedding_bag_per_sample_weights_backward": "_ d, _ d, _.., _.., _.. -> _.. ; linear 0 | 1",
        "aten::_embedding_bag": _embedding_bag,
        "aten::_embedding_bag_forward_only": _embedding_bag,
        "aten::_embedding_bag_backward": _embedding_bag_backward,
        "aten::_embedding_bag_dense_backward": "[b] [d], [i..], [o..], [s..], [m..], [w..] -> _ [d] ; linear 0",
    }
)
