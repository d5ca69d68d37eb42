"""Attention whose queries, keys and values are sharded by position: `shardwise::ring_attention` and its gradient.

Their positions are one factor, which has a kernel (`ring_kernels`): it passes blocks of keys and values from rank to
rank. Where all positions are on one rank, the same code runs as a ring of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .._torch.ops import OpOverload, schema_of
from ..sharding.layout import Factor, Layout
from .above_autograd import new_op
from .attention import inputs_of, mask_pattern
from .call import Call
from .kernel import FactorShard, Kernel, LocalCall, LocalResult, Steps
from .op import Local
from .reduce import wide
from .registry import definitions_in
from .ring_kernels import SEQUENCE, backward, forward, output_like

define = definitions_in(__name__)

T = TypeVar("T")
Run = Callable[[LocalCall, FactorShard], Steps[T]]

# ---- the ops --------------------------------------------------------------------------------------------------------

_OPTIONS = "Tensor? mask, Tensor? dropout, float dropout_p, bool is_causal, float scale, int[] documents, int zigzag, "
_QKV = "Tensor query, Tensor key, Tensor value"


def _one_device(query: Tensor, key: Tensor, value: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    """Return the op on plain tensors: a ring of one rank."""
    if query.is_meta:
        fused = args[1] is None and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        output = output_like(query, value, row_major=not fused)
        return output, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))
    return _on_plain(forward, ring_attention, query, (query, key, value, *args))


def _one_device_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the backward op on plain tensors: a ring of one rank."""
    if gradient.is_meta:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    return _on_plain(backward, ring_attention_backward, query, (gradient, query, key, value, *args))


def _on_plain(run: Run[T], op: OpOverload, query: Tensor, args: tuple[object, ...]) -> T:
    named = {argument.name: value for argument, value in zip(schema_of(op).arguments, args, strict=True)}
    layout = Layout.make((1,), tuple((Factor(size, ()),) for size in query.shape))
    return _on_one_rank(run, LocalCall(op, named, (), (), (), (), (), (0,), (layout, layout)))


ring_attention = new_op(f"ring_attention({_QKV}, {_OPTIONS} str rotate) -> (Tensor, Tensor)", _one_device)
ring_attention_backward = new_op(
    f"ring_attention_backward(Tensor gradient, {_QKV}, Tensor output, Tensor logsumexp, {_OPTIONS} str rotate) "
    "-> (Tensor, Tensor, Tensor)",
    _one_device_gradients,
)


def _patterns(call: Call) -> dict[str, str]:
    """Return the patterns of all operands, by name: queries, keys and values share the positions `s`."""
    query, key = tuple(call.arg("query").shape), tuple(call.arg("key").shape)
    heads, shared = ("(g r)", "g") if query[1] != key[1] else ("h", "h")
    found = {
        "query": f"b {heads} s [d]",
        "key": f"b {shared} s [d]",
        "value": f"b {shared} s [e]",
        "output": f"b {heads} s [e]",
        "logsumexp": f"b {heads} s",
    }
    found["gradient"] = found["output"]
    mask = call.arguments.get("mask")
    if mask is not None and len(mask.shape):
        found["mask"] = mask_pattern(tuple(mask.shape), (*query[:3], key[2]), ("b", heads, "s", "[t]"))
    return found


def _forward_rule(call: Call) -> str:
    """Return a rule with a kernel that handles the sequences of queries, keys and values."""
    patterns = _patterns(call)
    return f"{inputs_of(call, patterns)} -> {patterns['output']}, {patterns['logsumexp']} ; kernel s"


def _backward_rule(call: Call) -> str:
    """Return a rule like that of the forward op; the gradients are linear in the incoming gradient."""
    patterns = _patterns(call)
    results = ", ".join(patterns[name] for name in ("query", "key", "value"))
    return f"{inputs_of(call, patterns)} -> {results} ; linear 0 ; kernel s"


def _on_one_rank(run: Run[T], call: LocalCall) -> T:
    """Return the result of a kernel on a rank that holds all positions, without communication."""
    size = call["key"].shape[SEQUENCE]
    try:
        next(run(call, FactorShard(size, ((0, size),), 0)))
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a ring of one rank communicates nothing")


def _local(run: Run[LocalResult]) -> Local:
    """Return the local code of calls whose sequences are not sharded: attention on one rank."""
    return Local(lambda call: _on_one_rank(run, call))


define("shardwise::ring_attention", _forward_rule, kernels={"s": Kernel(forward)}, local=_local(forward))
define(
    "shardwise::ring_attention_backward",
    _backward_rule,
    kernels={"s": Kernel(backward)},
    local=_local(backward),
)
