"""Attention on a rank's part: never on an empty one, where some kernels divide by zero and take the process down."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .attention import KERNELS, backward, forward
from .attention_dropout import without_dropout
from .kernel import LocalCall
from .tables import LOCAL, ONLY_EMPTY, register


def local(call: LocalCall) -> Any:
    """The kernel, with lengths that are those of this part."""
    tensors = [value for value in call.arguments.values() if isinstance(value, Tensor)]
    if any(tensor.numel() == 0 for tensor in (call["query"], call["key"], call["value"])):
        return _nothing(call, tensors[0])
    lengths = {"max_q": call["query"].shape[2], "max_k": call["key"].shape[2]}
    results = call.run(**{name: length for name, length in lengths.items() if name in call.arguments})
    # Numbers among the results are of the whole, so that all ranks agree on them.
    whole = iter((call.shapes[0][2], call["key"].shape[2]))
    return tuple(next(whole) if isinstance(result, int) else result for result in results)


def _nothing(call: LocalCall, like: Tensor) -> Any:
    made = iter(
        like.new_zeros(layout.local_shape(call.at), dtype=dtype)
        for layout, dtype in zip(call.layouts, call.dtypes, strict=True)
    )
    returns = [str(result.type) for result in call.func._schema.returns]
    whole = iter((call.shapes[0][2], call["key"].shape[2]))
    return tuple(next(made, None) if kind == "Tensor" else next(whole) for kind in returns)


for _name, _outputs, _logsumexp, _padded in KERNELS:
    register(_name, without_dropout(forward(_outputs, _padded)))
    register(f"{_name}_backward", without_dropout(backward(_logsumexp, _padded)))
    LOCAL[_name] = LOCAL[f"{_name}_backward"] = local
# The others are told lengths, or tell them.
ONLY_EMPTY |= {KERNELS[0][0], f"{KERNELS[0][0]}_backward"}
