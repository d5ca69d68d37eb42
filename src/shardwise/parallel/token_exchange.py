"""Send tokens to the ranks of their experts, and results back, with gradients.

    route = route_rows(index.flatten(), axis)
    outputs = experts(to_experts(tokens, route, k), route.counts)
    combined = weighted_sum(to_tokens(outputs, route), weights)

`to_experts` and `to_tokens` are each other's gradients, so a backward pass uses the same route and reads nothing on the
host.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch.autograd import QuickFunction
from ..comm.token_route import TokenRoute


def to_experts(tokens: Tensor, route: TokenRoute, choices: int = 1) -> Tensor:
    """Return the rows for this rank's experts, sorted by expert: `route.counts` are their numbers.

    `tokens` is `[tokens, features]`. Each token goes to `choices` experts, so the route is that of `tokens * choices`
    rows.
    """
    moved: Tensor = _ToExperts.apply(tokens, route, choices)
    return moved


def to_tokens(rows: Tensor, route: TokenRoute) -> Tensor:
    """Return the results of the experts, `[tokens * choices, features]`, on the ranks that the tokens came from."""
    moved: Tensor = _ToTokens.apply(rows, route)
    return moved


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's results.

    `[tokens, features]` from rows `[tokens * choices, features]` and weights `[tokens, choices]`.
    """
    return (rows.unflatten(0, (-1, weights.shape[-1])) * weights.unsqueeze(-1)).sum(-2).to(rows.dtype)


class _ToExperts(QuickFunction):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, route: TokenRoute, choices: int) -> Tensor:
        ctx.route, ctx.choices = route, choices
        return route.send(tokens, choices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows = to_tokens(gradient, ctx.route)
        return rows if ctx.choices == 1 else rows.unflatten(0, (-1, ctx.choices)).sum(1), None, None


class _ToTokens(QuickFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: TokenRoute) -> Tensor:
        ctx.route = route
        return route.back(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return to_experts(gradient, ctx.route), None
