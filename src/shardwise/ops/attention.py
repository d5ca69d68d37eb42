"""Scaled dot product attention: the ops that PyTorch's backends provide, forward and backward.

Batch and heads may be sharded, and the positions of the queries unless a causal mask depends on them. The positions of
keys and values must be replicated: where they are sharded, `context_attention` runs another op. With fewer
heads of keys than of queries, each group of query heads shares one key head: the heads of the queries are then (g r).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._torch.ops import schema_of
from .attention_dropout import backward_with_dropout, forward_with_dropout
from .call import Call, Kwargs
from .kernel import LocalCall, LocalResult
from .op import Local
from .registry import definitions_in
from .schema import operands_of

define = definitions_in(__name__)

_MASKS = ("attn_mask", "attn_bias")
_LIKE_OUTPUT = ("grad_out", "grad_out_", "out")


# ---- rules ----------------------------------------------------------------------------------------------------------


def _patterns(call: Call, padded: bool) -> dict[str, str]:
    """Return the patterns by name: of the arguments of one call, of its output, and of the output's leading dims."""
    arguments: Kwargs = {name: call.arguments.get(name) for name in ("query", "key", "value", *_MASKS)}
    query, key = tuple(arguments["query"].shape), tuple(arguments["key"].shape)
    heads, shared = ("(g r)", "g") if query[1] != key[1] else ("h", "h")
    rows = "[s]" if call.arg("is_causal", False) or padded else "s"
    found = {
        "query": f"b {heads} {rows} [d]",
        "key": f"b {shared} [t] [d]",
        "value": f"b {shared} [t] [e]",
        "output": f"b {heads} {rows} [e]",
        "rows": f"b {heads} {rows}",
        "heads": f"b {heads}",
    }
    found |= dict.fromkeys(_LIKE_OUTPUT, found["output"])
    mask = next((arguments[name] for name in _MASKS if arguments[name] is not None), None)
    if mask is not None and len(mask.shape):
        text = mask_pattern(tuple(mask.shape), (*query[:3], key[2]), ("b", heads, rows, "[t]"))
        found |= dict.fromkeys(_MASKS, text)
    return found


def mask_pattern(mask: tuple[int, ...], scores: tuple[int, ...], names: tuple[str, ...]) -> str:
    """Return the pattern of a mask of this shape for scores with these sizes and patterns: `1` for broadcast dims."""
    last = zip(mask, scores[-len(mask) :], names[-len(mask) :], strict=True)
    return " ".join("1" if size == 1 and full != 1 else name for size, full, name in last)


def inputs_of(call: Call, patterns: dict[str, str]) -> str:
    """Return the left side of a rule from patterns by operand name; operands without one are replicated."""
    return ", ".join(patterns.get(argument.name, "_..") for argument in operands_of(call.op))


def _forward_rule(results: str, padded: bool) -> Callable[[Call], str | None]:
    """Return the rule of a forward op without dropout.

    With dropout it is decomposed. For the arguments see `_define`.
    """

    def rule(call: Call) -> str | None:
        if call.arg("dropout_p", 0.0) > 0:
            return None
        patterns = _patterns(call, padded)
        return f"{inputs_of(call, patterns)} -> {results.format(**patterns)}"

    return rule


def _backward_rule(logsumexp: str, padded: bool) -> Callable[[Call], str | None]:
    """Return the rule of a backward op, linear in the gradient, which is its first operand."""

    def rule(call: Call) -> str | None:
        if call.arg("dropout_p", 0.0) > 0:
            return None
        patterns = _patterns(call, padded)
        patterns["logsumexp"] = logsumexp.format(**patterns)
        results = [patterns["query"], patterns["key"], patterns["value"]]
        if len(schema_of(call.op).returns) > 3:
            results.append(patterns.get(_MASKS[0], "_.."))
        return f"{inputs_of(call, patterns)} -> {', '.join(results)} ; linear 0"

    return rule


# ---- on local shards ------------------------------------------------------------------------------------------------


def _run(call: LocalCall) -> tuple[LocalResult, ...]:
    """Run the op with the local lengths as arguments, but not on empty shards, on which some kernels divide by zero."""
    if any(call[name].numel() == 0 for name in ("query", "key", "value")):
        return _empty_results(call)
    local = {"max_q": call["query"].shape[2], "max_k": call["key"].shape[2]}
    results = call.run(**{name: length for name, length in local.items() if name in call.arguments})
    lengths = _global_lengths(call)
    return tuple(next(lengths) if isinstance(result, int) else result for result in results)


def _empty_results(call: LocalCall) -> tuple[LocalResult, ...]:
    like = next(value for value in call.arguments.values() if isinstance(value, Tensor))
    zeros = (call.zeros(like, result) for result in range(len(call.dtypes)))
    lengths = _global_lengths(call)
    kinds = [str(result.type) for result in schema_of(call.func).returns]
    return tuple(next(zeros, None) if kind == "Tensor" else next(lengths) for kind in kinds)


def _run_on_cpu(call: LocalCall) -> tuple[LocalResult, ...]:
    """Run an op for CPUs. The meta kernel of PyTorch 2.11 gives its logsumexp another dtype for float64 than the op."""
    output, *rows = _run(call)
    exact = call["query"].dtype is torch.float64
    return output, *(row.double() if exact and isinstance(row, Tensor) else row for row in rows)


def _global_lengths(call: LocalCall) -> Iterator[int]:
    """Yield the numbers among the results, the lengths of queries and keys: all ranks return the global ones."""
    return iter((call.shapes[0][2], call["key"].shape[2]))


# ---- records --------------------------------------------------------------------------------------------------------


def _define(op: str, results: str, logsumexp: str, padded: bool = False) -> None:
    """Define a forward op that can apply dropout, and its backward op.

    `results` are the patterns of the forward op's results, `logsumexp` is that of the backward op's argument. `padded`
    means that the op pads the rows of logsumexp as it likes, so that queries may not be sharded by position.
    """
    forward, backward = getattr(torch.ops.aten, op).default, getattr(torch.ops.aten, f"{op}_backward").default
    rule, local = _forward_rule(results, padded), Local(_run)
    define(f"aten::{op}", rule, local=local, reads_numbers=True, decomposition=forward_with_dropout(forward))
    define(
        f"aten::{op}_backward",
        _backward_rule(logsumexp, padded),
        local=local,
        reads_numbers=True,
        decomposition=backward_with_dropout(backward),
    )
    if op == "_scaled_dot_product_flash_attention":
        # The decomposition is written for the default overload, which has fewer arguments.
        define(f"aten::{op}.quantized", rule, local=local, reads_numbers=True)


def _same(count: int) -> str:
    """Return the patterns of `count` more results, lengths and states of generators, the same on all ranks."""
    return ", _.." * count + f" ; reduce {', '.join(['sum', 'sum', *['same'] * count])}"


_define("_scaled_dot_product_flash_attention", "{output}, {rows}" + _same(5), "{rows}")
_define("_scaled_dot_product_efficient_attention", "{output}, {heads} _" + _same(2), "{heads} _", padded=True)
_define("_scaled_dot_product_cudnn_attention", "{output}, {heads} _.." + _same(5), "{heads} _..", padded=True)
_define(
    "_scaled_dot_product_fused_attention_overrideable", "{output}, {heads} _.." + _same(5), "{heads} _..", padded=True
)

# On CPU there is no dropout, and no argument or result is a length.
define(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    _forward_rule("{output}, {rows}", padded=False),
    local=Local(_run_on_cpu, when="empty shard"),
)
define(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    _backward_rule("{rows}", padded=False),
    local=Local(_run_on_cpu, when="empty shard"),
)

# PyTorch decomposes it into matrix products, and makes a causal mask for them.
define("aten::_scaled_dot_product_attention_math", makes_tensors=True)
