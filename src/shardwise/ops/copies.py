"""Copies, casts, aliases and new tensors like a given one: each rank does its part."""

from __future__ import annotations

from .call import Call
from .tables import register_table

_ANY_PARTIAL = "linear 0 ; monotone 0"


def cast(call: Call) -> str:
    """A cast between floating dtypes passes through a sum; rounding to integers does not."""
    source, target = call.tensors[0].dtype, call.arg("dtype", None)
    exact = target is None or target == source
    floating = exact or (source.is_floating_point and target.is_floating_point)
    return f"x.. -> x.. {'; linear 0' if floating else ''} {'; monotone 0' if exact else ''}"


def new(call: Call) -> str:
    """A tensor of another shape is made whole on every rank, one of the same shape is cut as the given one."""
    size = tuple(call.arg("size"))
    if size == call.shape(0):
        return "x.. -> x.. ; size=(x..)"
    return f"x.. -> {' '.join('_' for _ in size)} ; unread"


def overwrite(call: Call) -> str:
    """`copy_`: the source, broadcast, takes the place of the target."""
    return "b.., b?.. -> b.. ; linear 0+1"


register_table(
    {
        "aten::detach": f"x.. -> x.. ; {_ANY_PARTIAL}",
        "aten::alias": f"x.. -> x.. ; {_ANY_PARTIAL}",
        "aten::clone": f"x.. -> x.. ; {_ANY_PARTIAL}",
        "aten::lift_fresh": f"x.. -> x.. ; {_ANY_PARTIAL}",
        "aten::_to_copy": cast,
        "aten::copy": overwrite,
        "aten::zeros_like": "x.. -> x.. ; linear 0",
        "aten::ones_like": "x.. -> x..",
        "aten::empty_like": "x.. -> x..",
        "aten::full_like": "x.. -> x..",
        "aten::new_zeros": new,
        "aten::new_ones": new,
        "aten::new_empty": new,
        "aten::new_full": new,
    }
)
