"""Mixtures of experts in plain PyTorch, as programs write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SortedExperts(nn.Module):
    """Stacked weights, called with rows sorted by expert and the number of rows of each, as in torchtitan."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).int()
        gate = F.silu(F.grouped_mm(rows, self.w1.transpose(1, 2), offs=ends))
        up = F.grouped_mm(rows, self.w3.transpose(1, 2), offs=ends)
        return F.grouped_mm(gate * up, self.w2.transpose(1, 2), offs=ends)


class ChosenExperts(SortedExperts):
    """The same, called with tokens, their experts and their weights, as in transformers."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__(experts, width, hidden)
        self.num_experts = experts

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        choices = index.shape[-1]
        found, order = index.flatten().sort(stable=True)
        counts = F.one_hot(found, self.num_experts).sum(0)
        rows = super().forward(tokens[order // choices], counts)
        rows = rows[order.argsort()] * weights.reshape(-1, 1)
        return rows.unflatten(0, (-1, choices)).sum(1)


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ListedExperts(nn.ModuleList):
    """One module for each expert."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__(Expert(width, hidden) for _ in range(experts))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            token, place = torch.where(index == number)
            result = result.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return result


KINDS: dict[str, type[nn.Module]] = {"sorted": SortedExperts, "chosen": ChosenExperts, "list": ListedExperts}


class Mixture(nn.Module):
    """A router and experts. `forward` returns the output, the load-balancing loss and the z-loss of the router."""

    def __init__(self, kind: str, experts: int = 8, choices: int = 2, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.kind, self.choices, self.number = kind, choices, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = KINDS[kind](experts, width, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        scores = logits.softmax(-1)
        weights, index = scores.topk(self.choices, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.sorted_call(x, index, weights) if self.kind == "sorted" else self.experts(x, index, weights)
        chosen = F.one_hot(index, self.number).to(x.dtype).sum(1).mean(0)
        balance = self.number * (chosen * scores.mean(0)).sum() / self.choices
        return out, balance, logits.logsumexp(-1).square().mean()

    def sorted_call(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        order = index.flatten().argsort(stable=True)
        counts = F.one_hot(index.flatten(), self.number).sum(0)
        rows = self.experts(x[order // self.choices], counts)
        return (rows[order.argsort()].unflatten(0, (-1, self.choices)) * weights.unsqueeze(-1)).sum(1)
