"""Grad mode, no_grad and inference_mode choose the same placements."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.testing import assemble
from tests.ops.helpers import on, r, ranks

OPS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "add": (torch.add, (r(4, 6), r(4, 6, seed=1))),
    "broadcast": (torch.mul, (r(4, 6), r(6))),
    "relu": (torch.relu, (r(4, 6),)),
    "gelu": (F.gelu, (r(4, 6),)),
    "silu": (F.silu, (r(4, 6),)),
    "where": (lambda x, y: torch.where(x > 0, x, y), (r(4, 6), r(4, 6, seed=1))),
    "mm": (torch.mm, (r(4, 6), r(6, 2))),
    "matmul": (torch.matmul, (r(2, 4, 6), r(6, 2))),
    "batched matmul": (torch.matmul, (r(2, 4, 6), r(2, 6, 3))),
    "matrix and vector": (torch.matmul, (r(4, 6), r(6))),
    "linear": (F.linear, (r(2, 4, 6), r(8, 6), r(8))),
    "linear without bias": (F.linear, (r(4, 6), r(8, 6))),
    "einsum": (lambda x, y: torch.einsum("bmk,kn->bmn", x, y), (r(2, 4, 6), r(6, 2))),
    "sum": (lambda x: x.sum(0), (r(4, 6),)),
    "sum of all": (torch.sum, (r(4, 6),)),
    "mean": (lambda x: x.mean(-1), (r(4, 6),)),
    "var": (lambda x: x.var(1), (r(4, 6),)),
    "norm": (lambda x: x.norm(), (r(4, 6),)),
    "amax": (lambda x: x.amax(0), (r(4, 6),)),
    "max": (lambda x: x.max(1).values, (r(4, 6),)),
    "softmax": (lambda x: x.softmax(-1), (r(4, 6),)),
    "log_softmax": (lambda x: x.log_softmax(0), (r(4, 6),)),
    "logsumexp": (lambda x: x.logsumexp(1), (r(4, 6),)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w), (r(4, 6), r(6))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (r(4, 6), r(6))),
    "group_norm": (lambda x: F.group_norm(x, 2), (r(4, 6, 3),)),
    "conv2d": (F.conv2d, (r(2, 4, 6, 6), r(8, 4, 3, 3), r(8))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (r(2, 4, 6, 6),)),
    "attention": (F.scaled_dot_product_attention, (r(2, 4, 6, 8), r(2, 4, 6, 8, seed=1), r(2, 4, 6, 8, seed=2))),
    "embedding": (lambda w: F.embedding(torch.ops.aten.zeros_like(w[:, 0]).long(), w), (r(8, 4),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, x.argmax(1)), (r(4, 6),)),
    "mse_loss": (F.mse_loss, (r(4, 6), r(4, 6, seed=1))),
    "view": (lambda x: x.view(2, 2, 6), (r(4, 6),)),
    "reshape": (lambda x: x.transpose(0, 1).reshape(24), (r(4, 6),)),
    "flatten": (lambda x: x.flatten(1), (r(2, 4, 6),)),
    "permute": (lambda x: x.permute(2, 0, 1), (r(2, 4, 6),)),
    "narrow": (lambda x: x[:, 1:5], (r(4, 6),)),
    "chunk": (lambda x: x.chunk(2, 1), (r(4, 6),)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (r(4, 6), r(4, 2))),
    "stack": (lambda x, y: torch.stack([x, y]), (r(4, 6), r(4, 6, seed=1))),
    "cumsum": (lambda x: x.cumsum(0), (r(4, 6),)),
    "sort": (lambda x: x.sort(1).values, (r(4, 6),)),
    "expand": (lambda x: x.expand(3, 4, 6), (r(4, 6),)),
    "pad": (lambda x: F.pad(x, (1, 1)), (r(4, 6),)),
    "tril": (torch.tril, (r(4, 6),)),
    "t": (torch.t, (r(4, 6),)),
}
OTHER_OPS = {"rms_norm"}
"""PyTorch itself calls other ops for these where gradients are needed; only their values are the same."""

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def placements_for(dims: int) -> list[list[Any]]:
    return [[Replicate()], *([Shard(dim)] for dim in range(min(dims, 2))), [Partial()]]


@pytest.mark.filterwarnings("ignore::shardwise.dispatch.fallback.GatherWarning")
@pytest.mark.parametrize("name", OPS)
def test_the_same_choice(name: str) -> None:
    fn, tensors = OPS[name]
    wanted = _leaves(fn(*tensors))
    with ranks(2) as mesh:
        for first in placements_for(tensors[0].dim()):
            for rest in (
                [[Replicate()]] if len(tensors) == 1 else placements_for(min(t.dim() for t in tensors[1:]))[:-1]
            ):
                found = {}
                for mode, entered in MODES.items():
                    # Leaves of each mode: inference tensors in inference mode.
                    with entered():
                        given = [
                            on(mesh, t, *(rest if i else first), grad=mode == "grad") for i, t in enumerate(tensors)
                        ]
                        results = _leaves(fn(*given))
                        found[mode] = [result.placements for result in results]
                        for result, want in zip(results, wanted, strict=True):
                            torch.testing.assert_close(assemble(result.detach()), want, rtol=1e-4, atol=1e-4)
                if name not in OTHER_OPS:
                    assert found["grad"] == found["no_grad"] == found["inference"], (first, rest)


def _leaves(result: Any) -> list[Any]:
    return [result] if isinstance(result, (Tensor, DTensor)) else list(result)
