"""Run code for plain tensors on each simulated rank, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..world import RankTensor


class ForEachRank(torch.autograd.Function):
    """An autograd function that calls a function of plain tensors on each simulated rank."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Sequence[Tensor]], ranks: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of `run(rank, *tensors)` for every rank, joined, and save their graphs.

        Only the first two results are differentiable.
        """
        wanted = ctx.needs_input_grad[2:]
        ctx.graphs = []
        for rank in range(ranks):
            own = [tensor.shards[rank] if isinstance(tensor, RankTensor) else tensor for tensor in tensors]
            given = [one.detach().requires_grad_(needed) for one, needed in zip(own, wanted, strict=True)]
            with torch.set_grad_enabled(any(wanted)):
                ctx.graphs.append((given, tuple(run(rank, *given))))
        joined = tuple(RankTensor(column) for column in zip(*(results for _, results in ctx.graphs), strict=True))
        ctx.mark_non_differentiable(*joined[2:])
        ctx.set_materialize_grads(False)  # PyTorch cannot make zeros of shapes that differ between ranks
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: RankTensor | None) -> tuple[RankTensor | None, ...]:
        """Return the gradients of each rank's tensors from those of its results."""
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        columns: list[list[Tensor]] = [[] for _ in wanted]
        for rank, (given, results) in enumerate(ctx.graphs):
            pairs = [
                (result, gradient.shards[rank])
                for result, gradient in zip(results, gradients, strict=True)
                if gradient is not None and result.requires_grad
            ]
            inputs = [given[i] for i in wanted]
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                inputs,
                [gradient for _, gradient in pairs],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for column, gradient in zip(columns, found, strict=True):
                column.append(gradient)
        made = iter(RankTensor(column) for column in columns)
        return None, None, *(next(made) if needed else None for needed in ctx.needs_input_grad[2:])
