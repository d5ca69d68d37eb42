"""`torch.nn.attention.varlen.varlen_attn` (attention of packed documents), by `shardwise::ring_attention`.

PyTorch's kernel runs on some GPUs only; distributed tensors run it on any device. The lengths are read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from .above_autograd import are_distributed
from .attention_method import zigzag_ranks
from .call import Kwargs
from .registry import definitions_in, resolve
from .ring_attention import ring_attention, ring_attention_backward
from .schema import overloads
from .sequence_options import sequence_mode

define = definitions_in(__name__)

# PyTorch defines these ops when its module is imported.
_FORWARD, _BACKWARD = "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"
_UNSERVED = ("seqused_k", "block_table", "num_splits")


def _varlen(*args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, its logsumexp as `[heads, tokens]`, and an unused state of a generator."""
    given = _arguments(_FORWARD, args, kwargs)
    unserved = [name for name in _UNSERVED if given.get(name) is not None]
    if unserved:
        raise InputError(
            f"varlen_attn of DTensors does not take {' and '.join(unserved)}",
            f"leave out {' and '.join(unserved)}, or pass plain tensors",
        )
    tensors = [_batched(given[name]) for name in ("query", "key", "value")]
    output, logsumexp = ring_attention(*tensors, *_options(tensors, given))
    state = torch.zeros(2, dtype=torch.uint64, device=output.device)
    return output.squeeze(0).transpose(0, 1), logsumexp.squeeze(0), state


def _varlen_backward(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values."""
    given = _arguments(_BACKWARD, args, kwargs)
    tensors = [_batched(given[name]) for name in ("query", "key", "value")]
    saved = _batched(given["out"]), given["lse"].unsqueeze(0)
    found = ring_attention_backward(_batched(given["grad_out"]), *tensors, *saved, *_options(tensors, given))
    return tuple(tensor.squeeze(0).transpose(0, 1) for tensor in found)


def _arguments(name: str, args: tuple[object, ...], kwargs: Kwargs) -> Kwargs:
    """Return all arguments of a call by name: PyTorch's versions differ in their order."""
    return resolve(next(overloads(name))).arguments(args, kwargs)


def _batched(tensor: Tensor) -> Tensor:
    """Return `[tokens, heads, features]` as `[1, heads, tokens, features]`."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _options(tensors: Sequence[Tensor], given: Kwargs) -> tuple[object, ...]:
    """Return the options of `ring_attention`: no mask and no dropout, whether it is causal, the documents, ..."""
    if not are_distributed(tensors):
        plain = [name for name, x in zip(("query", "key", "value"), tensors, strict=True) if not are_distributed([x])]
        raise InputError(
            f"varlen_attn got DTensors, but plain tensors as {' and '.join(plain)}",
            "distribute all three on one mesh: distribute_tensor(x, mesh, placements)",
        )
    window = tuple(given.get("window_size") or (-1, 0 if given["is_causal"] else -1))
    documents: list[int] = given["cu_seq_q"].tolist()
    of_keys = documents if given["cu_seq_k"] is None else given["cu_seq_k"].tolist()
    if window not in ((-1, -1), (-1, 0)) or of_keys != documents:
        raise InputError(
            f"varlen_attn of DTensors with the window {window}, cu_seq_q {documents} and cu_seq_k {of_keys}",
            "use the windows (-1, -1) or (-1, 0), and the same documents for queries and keys",
        )
    scale = tensors[0].shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    rotate = "gather" if sequence_mode().method == "gather" else "ring"
    zigzag = zigzag_ranks(*(tensor._spec for tensor in tensors))
    return None, None, 0.0, window == (-1, 0), scale, list(dict.fromkeys(documents)), zigzag, rotate


define(_FORWARD, decomposition=_varlen, takes_plain=True)
define(_BACKWARD, decomposition=_varlen_backward, takes_plain=True)
