"""PyTorch's fused attention kernels on a GPU, for blocks of keys.

cuDNN's kernels are the quickest on recent GPUs, where PyTorch prefers them, too. Flash attention serves the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output of a block and its logsumexp, `[batch, heads, positions]`."""
    if _takes_cudnn(query, key, value, causal):
        found = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, scale=scale)
        return found[0], found[1].view(query.shape[:-1])
    found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def gradients_on_gpu(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given the output and logsumexp of all blocks together."""
    lengths = None, None, query.shape[2], key.shape[2]
    tensors, rows = (gradient, query, key, value, output), logsumexp.contiguous()
    if _takes_cudnn(query, key, value, causal):
        unused = torch.zeros((), dtype=torch.int64, device=query.device)
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, rows.unsqueeze(-1), unused, unused, None, *lengths, 0.0, causal, scale=scale
        )
    else:
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, rows, *lengths, 0.0, causal, unused, unused[:0], scale=scale
        )
    return found[0], found[1], found[2]


def _takes_cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    cuda = torch.backends.cuda
    if not cuda.cudnn_sdp_enabled() or torch.cuda.get_device_capability(query.device) < (9, 0):
        return False
    if not query.numel() or not key.numel():
        return False
    params = cuda.SDPAParams(query, key, value, None, 0.0, causal, query.shape[1] != key.shape[1])
    return bool(cuda.can_use_cudnn_attention(params))
