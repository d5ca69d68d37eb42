"""Small models in plain PyTorch, and the comparison of a parallelized one with the one on one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import CommDebugMode

WIDTH = 16


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """The number of heads follows from the projections' outputs, so that it works on local shards too."""

    def __init__(self, width: int = WIDTH, head: int = 4) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Half(nn.Module):
    """Half a transformer block: a norm, a module, and a residual connection around both."""

    def __init__(self, inner: nn.Module, affine: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width, elementwise_affine=affine), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@contextmanager
def line_of(ranks: int) -> Any:
    """A mesh with the one axis tp, of simulated ranks."""
    with simulate(ranks):
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def first(tensor: Tensor) -> Tensor:
    """The value of a tensor on the first rank of this process."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.shards[0] if hasattr(tensor, "shards") else tensor


def counts(comm: CommDebugMode) -> dict[str, int]:
    return {str(op).partition(".")[2]: n for op, n in comm.get_comm_counts().items()}


def follows_one_device(
    make: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, DeviceMesh], object],
    mesh: DeviceMesh,
    x: Tensor,
    sharded: int | None = None,
    output_sharded: int | None = None,
    distributed: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Check output and gradients; return the counts of collectives, forward and backward.

    The input is local, or a DTensor if `distributed`; it is sharded in the dim `sharded`, else replicated. A local
    output is sharded in `output_sharded`.
    """
    alone = made(make)
    whole = x.clone().requires_grad_(x.is_floating_point())
    expected = alone(whole)
    weight = torch.randn(expected.shape)
    (expected * weight).sum().backward()

    model = made(make)
    parallelize(model, mesh)
    placements = [Replicate() if sharded is None else Shard(sharded)]
    leaf = distribute_tensor(x, mesh, placements).requires_grad_(x.is_floating_point())
    given = leaf if distributed else leaf.to_local()
    with CommDebugMode() as forward:
        out = model(given)
    of_output = [Replicate() if output_sharded is None else Shard(output_sharded)]
    result = out if isinstance(out, DTensor) else DTensor.from_local(out, mesh, of_output, shape=expected.shape)
    torch.testing.assert_close(first(result), expected.detach())
    cotangent = distribute_tensor(weight, mesh, result.placements)
    with CommDebugMode() as backward:
        torch.autograd.backward(result, cotangent)
    for (name, parameter), reference in zip(model.named_parameters(), alone.parameters(), strict=True):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert gradient.placements == parameter.placements, name
        torch.testing.assert_close(first(gradient), reference.grad, msg=lambda text, name=name: f"{name}: {text}")
    if leaf.requires_grad:
        torch.testing.assert_close(first(leaf.grad), whole.grad)
    return counts(forward), counts(backward)


def rank() -> int:
    return dist.get_rank()
