"""Shapes: views, permutations, slices, joins."""

from __future__ import annotations

from .build import view_rule
from .registry import Call, register_table


def infer_size(shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    known = 1
    for n in size:
        known *= n if n != -1 else 1
    total = 1
    for n in shape:
        total *= n
    return tuple(total // known if n == -1 else n for n in size)


def view(call: Call) -> str:
    shape = call.shape(0)
    return view_rule(shape, infer_size(shape, tuple(call.arg("size"))))


def permute(call: Call) -> str:
    ndim = call.ndim(0)
    dims = [d % ndim for d in call.arg("dims")]
    return f"{' '.join(f'x{d}' for d in range(ndim))} -> {' '.join(f'x{d}' for d in dims)} ; linear 0 ; monotone 0"


def transpose(call: Call) -> str:
    ndim = call.ndim(0)
    dims = list(range(ndim))
    if ndim:
        a, b = call.arg("dim0", 0) % ndim, call.arg("dim1", 1) % ndim
        dims[a], dims[b] = dims[b], dims[a]
    return f"{' '.join(f'x{d}' for d in range(ndim))} -> {' '.join(f'x{d}' for d in dims)} ; linear 0 ; monotone 0"


def t(call: Call) -> str:
    return "x.. -> x.. ; linear 0" if call.ndim(0) < 2 else "m n -> n m ; linear 0 ; monotone 0"


register_table(
    {
        "aten::view": lambda call: view(call) + " ; linear 0 ; monotone 0",
        "aten::_unsafe_view": lambda call: view(call) + " ; linear 0 ; monotone 0",
        "aten::permute": permute,
        "aten::transpose.int": transpose,
        "aten::t": t,
    }
)
