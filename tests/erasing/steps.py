"""A small model, its training step, and a comparison of the step with its erased twin."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor, P, distribute_module, distribute_tensor, erase
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def model_on(mesh: Any, layers: int = 2, dropout: float = 0.0, local: bool = False) -> nn.Module:
    """Tensor parallel over the last axis of the mesh, replicated over the others. The same weights at each call."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(dropout) for _ in range(layers)))
    styles = {"*.up": ColwiseParallel(use_local_output=local), "*.down": RowwiseParallel(use_local_output=local)}
    parallelize_module(model, mesh, {name: style.over("b") for name, style in styles.items()})
    return model if local else distribute_module(model, mesh)


def batch(mesh: Any, seed: int, rows: int = 6) -> Tensor:
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(values, mesh, P("a"))


Setup = Callable[[], tuple[Callable[..., Any], list[nn.Module]]]


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.detach().full_tensor()
    return value.detach() if isinstance(value, Tensor) else value


def compare(
    setup: Setup, batches: list[tuple[Any, ...]], between: Callable[[int], None] = lambda i: None, **options: Any
) -> Any:
    """Run a step as written and erased on the same batches: results, parameters, buffers, gradients are the same bits.

    `setup` returns the step and the modules it trains. Returns the erased step.
    """
    traces = []
    for erased in (False, True):
        step, modules = setup()
        step = erase(step, **options) if erased else step
        torch.manual_seed(1)
        trace: list[Any] = []
        for i, args in enumerate(batches):
            found = step(*args)
            trace += [full(value) for value in (found if isinstance(found, (tuple, list)) else [found])]
            between(i)
            for module in modules:
                trace += [full(copy.copy(tensor)) for tensor in (*module.parameters(), *module.buffers())]
                trace += [full(p.grad) for p in module.parameters()]
        trace.append(torch.rand(3))  # the generator is where it would be
        traces.append(trace)
    for written, replayed in zip(*traces, strict=True):
        assert type(written) is type(replayed)
        if isinstance(written, Tensor):
            torch.testing.assert_close(replayed, written, rtol=0, atol=0, equal_nan=True)
    return step
