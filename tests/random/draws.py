"""Every op that draws, as a function of a distributed tensor of shape (6, 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor

SHAPE = (6, 6)


def filled(fill: Callable[[Tensor], Any]) -> Callable[[DTensor], Tensor]:
    """A fill of a tensor like the given one; `nn.init` and in-place ops."""

    def run(x: DTensor) -> Tensor:
        made = torch.empty_like(x)
        with torch.no_grad():
            fill(made)
        return made

    return run


def with_gradient(fn: Callable[[DTensor], Tensor]) -> Callable[[DTensor], Tensor]:
    """The result and the gradient, one after the other: what was dropped forward is dropped backward."""

    def run(x: DTensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = fn(x)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        return torch.cat([y.detach(), x.grad])

    return run


def images(x: DTensor, dims: int) -> Tensor:
    return (x.abs() + 1).view(6, 6, *[1] * dims).expand(6, 6, *[2] * dims)


DRAWS: dict[str, Callable[[DTensor], Tensor]] = {
    "uniform_": filled(lambda t: t.uniform_(2, 3)),
    "normal_": filled(lambda t: t.normal_(1, 2)),
    "exponential_": filled(lambda t: t.exponential_(2)),
    "log_normal_": filled(lambda t: t.log_normal_()),
    "cauchy_": filled(lambda t: t.cauchy_()),
    "geometric_": filled(lambda t: t.geometric_(0.3)),
    "bernoulli_": filled(lambda t: t.bernoulli_(0.4)),
    "bernoulli_ with a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli with a number": lambda x: torch.bernoulli(x, 0.4),
    "random_": filled(lambda t: t.random_()),
    "random_ up to": filled(lambda t: t.random_(1000)),
    "random_ in a range": filled(lambda t: t.random_(-3, 9)),
    "random_ in a wide range": filled(lambda t: t.random_(0, 1 << 24)),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like float64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "rand_like bfloat16": lambda x: torch.rand_like(x, dtype=torch.bfloat16),
    "randn_like complex": lambda x: torch.randn_like(x, dtype=torch.complex64),
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randint_like from": lambda x: torch.randint_like(x, 5, 10),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal around": lambda x: torch.normal(x, 1.0),
    "normal as wide as": lambda x: torch.normal(0.5, x.abs()),
    "dropout": with_gradient(lambda x: F.dropout(x, 0.5)),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "native_dropout": with_gradient(lambda x: torch.native_dropout(x, 0.5, True)[0]),
    "dropout1d": lambda x: F.dropout1d(images(x, 1), 0.5),
    "dropout2d": lambda x: F.dropout2d(images(x, 2), 0.5),
    "dropout3d": lambda x: F.dropout3d(images(x, 3), 0.5),
    "alpha_dropout": with_gradient(lambda x: F.alpha_dropout(x, 0.5, True)),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(images(x, 1), 0.5, True),
    "rrelu": with_gradient(lambda x: F.rrelu(x, training=True)),
    "rrelu in place": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "poisson": lambda x: torch.poisson(x.abs() * 4),
    "binomial": lambda x: torch.binomial((x.abs() * 8).round(), x.sigmoid()),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.1),
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 0.1),
    "gumbel_softmax": with_gradient(lambda x: F.gumbel_softmax(x)),
    "multinomial": lambda x: torch.multinomial(x.abs(), 1),
    "multinomial of several": lambda x: torch.multinomial(x.abs(), 3),
    "multinomial with replacement": lambda x: torch.multinomial(x.abs(), 8, replacement=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(2, 3, 6)] * 3, dropout_p=0.5),
    "nn.init.uniform_": filled(nn.init.uniform_),
    "nn.init.normal_": filled(nn.init.normal_),
    "nn.init.kaiming_uniform_": filled(lambda t: nn.init.kaiming_uniform_(t, a=5**0.5)),
    "nn.init.kaiming_normal_": filled(nn.init.kaiming_normal_),
    "nn.init.xavier_uniform_": filled(nn.init.xavier_uniform_),
    "nn.init.xavier_normal_": filled(nn.init.xavier_normal_),
    "nn.init.trunc_normal_": filled(nn.init.trunc_normal_),
    "nn.init.orthogonal_": filled(nn.init.orthogonal_),
    "nn.init.sparse_": filled(lambda t: nn.init.sparse_(t, 0.3)),
}
"""By name; each gives a distributed tensor, and the same numbers for the same state of the generator."""

FILLS = list(DRAWS)[: list(DRAWS).index("dropout in place")]
"""Those that are one draw, and little else."""

OWN_WAYS = {"rrelu", "rrelu in place", "multinomial with replacement"}
"""PyTorch draws for some elements alone, depending on data. Outside `exact`, here all are drawn for."""
