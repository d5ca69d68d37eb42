"""Attention: batch and heads are cut freely, the queries' positions where no causal mask counts them.

Keys and values are whole along their positions: merging partial attention is another algorithm (context parallelism).
With fewer heads of keys than of queries, each group of query heads shares one: heads are then (g r).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..notation.schema import operands_of
from .call import Call

_MASKS = ("attn_mask", "attn_bias")
_LIKE_OUTPUT = ("grad_out", "grad_out_", "out")


def texts(call: Call, padded: bool = False) -> dict[str, str]:
    """The patterns of queries, keys, values, the output and the mask of one call, by name."""
    arguments: dict[str, Any] = {name: call.arguments.get(name) for name in ("query", "key", "value", *_MASKS)}
    query, key = tuple(arguments["query"].shape), tuple(arguments["key"].shape)
    grouped = query[1] != key[1]
    heads, shared = ("(g r)", "g") if grouped else ("h", "h")
    rows = "[s]" if call.arg("is_causal", False) or padded else "s"
    found = {
        "query": f"b {heads} {rows} [d]",
        "key": f"b {shared} [t] [d]",
        "value": f"b {shared} [t] [e]",
        "output": f"b {heads} {rows} [e]",
        "rows": f"b {heads} {rows}",
        "heads": f"b {heads}",
    }
    mask = next((arguments[name] for name in _MASKS if arguments[name] is not None), None)
    if mask is not None and len(mask.shape):
        sizes, names = (*query[:3], key[2]), ("b", heads, rows, "[t]")
        last = -len(mask.shape)
        there = zip(mask.shape, sizes[last:], names[last:], strict=True)
        # A dim of size 1 holds for all.
        found["mask"] = " ".join("1" if size == 1 and whole != 1 else name for size, whole, name in there)
    return found


def forward(outputs: str, padded: bool = False) -> Callable[[Call], str]:
    """The rule of a forward kernel. `padded`: what it keeps for backward is as long as it likes."""

    def rule(call: Call) -> str:
        text = texts(call, padded)
        inputs = [_input(argument.name, text, "rows") for argument in operands_of(call.op)]
        return f"{', '.join(inputs)} -> {outputs.format(**text)}"

    return rule


def backward(logsumexp: str, padded: bool = False) -> Callable[[Call], str]:
    """The rule of a backward kernel: linear in the gradient, which comes first."""

    def rule(call: Call) -> str:
        text = texts(call, padded)
        text["logsumexp"] = logsumexp.format(**text)
        inputs = [_input(argument.name, text, "logsumexp") for argument in operands_of(call.op)]
        results = [text["query"], text["key"], text["value"]]
        if len(call.op._schema.returns) > 3:
            results.append(text.get("mask", "_.."))
        return f"{', '.join(inputs)} -> {', '.join(results)} ; linear 0"

    return rule


def _input(name: str, text: dict[str, str], logsumexp: str) -> str:
    if name in _LIKE_OUTPUT:
        return text["output"]
    if name in _MASKS:
        return text.get("mask", "_..")
    if name == "logsumexp":
        return text[logsumexp]
    return text.get(name, "_..")


def _kept(count: int) -> str:
    """So many more results that all ranks find alike: lengths, and states of the generator."""
    return ", _.." * count + f" ; reduce {', '.join(['sum', 'sum', *['same'] * count])}"


_FUSED = "{output}, {heads} _.."

KERNELS = (
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "{output}, {rows}", "{rows}", False),
    ("aten::_scaled_dot_product_flash_attention", "{output}, {rows}" + _kept(5), "{rows}", False),
    # Its sums are padded to a multiple of 32 rows.
    ("aten::_scaled_dot_product_efficient_attention", "{output}, {heads} _" + _kept(2), "{heads} _", True),
    ("aten::_scaled_dot_product_cudnn_attention", _FUSED + _kept(5), "{heads} _..", True),
    ("aten::_scaled_dot_product_fused_attention_overrideable", _FUSED + _kept(5), "{heads} _..", True),
)
"""The kernels: their name, their results, the pattern of the sums they keep for backward, whether these are padded."""
