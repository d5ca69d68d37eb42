"""Dispatch modes of PyTorch around distributed tensors see the ops that they know, with global shapes.

What they see with plain tensors and with torch.distributed.tensor is the measure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import shardwise
from shardwise import Replicate, Shard, init_device_mesh
from tests.ops.helpers import on, r, ranks, whole
from tests.processes.pool import on_processes
from tests.worlds import lone_rank

aten = torch.ops.aten
Make = Callable[..., Tensor]


def matrix(make: Make) -> Tensor:
    return F.linear(make(r(8, 16), 0), make(r(8, 16, seed=1)))


def biased(make: Make) -> Tensor:
    return F.linear(make(r(2, 8, 16), 1), make(r(8, 16, seed=1)), make(r(8)))


def column_parallel(make: Make) -> Tensor:
    return F.linear(make(r(2, 8, 16)), make(r(8, 16, seed=1), 0))


def row_parallel(make: Make) -> Tensor:
    return F.linear(make(r(2, 8, 16), 2), make(r(8, 16, seed=1), 1))


def product(make: Make) -> Tensor:
    return make(r(8, 16), 0) @ make(r(16, 4))


PROGRAMS = [matrix, biased, column_parallel, row_parallel, product]
REFUSED = [biased] if torch.__version__ < (2, 13) else []
"""What PyTorch's own cannot do: flatten a dim that is sharded, behind one that is not."""


def plain(tensor: Tensor, dim: int | None = None) -> Tensor:
    return tensor.clone().requires_grad_()


def ours(mesh: Any) -> Make:
    def make(tensor: Tensor, dim: int | None = None) -> Tensor:
        placements = [Replicate() if dim is None else Shard(dim)]
        return shardwise.distribute_tensor(tensor, mesh, placements).requires_grad_()

    return make


def theirs(mesh: Any) -> Make:
    def make(tensor: Tensor, dim: int | None = None) -> Tensor:
        placement = torch_tensor.Replicate() if dim is None else torch_tensor.Shard(dim)
        return torch_tensor.distribute_tensor(tensor, mesh, [placement]).requires_grad_()

    return make


def flops(program: Callable[[Make], Tensor], make: Make) -> tuple[int, int, int]:
    """Counted in forward, in backward, and in a backward pass that alone is counted."""
    with FlopCounterMode(display=False) as both:
        result = program(make)
        forward = both.get_total_flops()
        result.sum().backward()
    result = program(make).sum()
    with FlopCounterMode(display=False) as alone:
        result.backward()
    return forward, both.get_total_flops() - forward, alone.get_total_flops()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_counter_counts_the_flops_of_the_global_tensors(program: Any) -> None:
    expected = flops(program, plain)
    assert expected[1] == expected[2] > 0
    with lone_rank() as mesh:
        if program not in REFUSED:
            assert flops(program, theirs(mesh)) == expected
        assert flops(program, ours(mesh)) == expected
    with ranks(4) as mesh:
        assert flops(program, ours(mesh)) == expected


def test_backward_of_a_linear_layer() -> None:
    with ranks(4) as mesh:
        x, w = on(mesh, r(6, 8), Shard(0), grad=True), on(mesh, r(16, 8), grad=True)
        with FlopCounterMode(display=False) as counter:
            F.linear(x, w).sum().backward()
    assert counter.get_flop_counts()["Global"] == {aten.mm: 3 * 2 * 6 * 8 * 16}


# ---- selective checkpointing ----------------------------------------------------------------------------------------


def two_layers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, a)), b).sin()


class Policy:
    """Saves matrix products; counts the ops that it is asked about in forward."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self.forward[str(op)] += not ctx.is_recompute
        save = op in (aten.mm.default, aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (aten.mm.default, aten.addmm.default)
        return func(*args, **(kwargs or {}))


def selectively(run: Any, policy: Any, *tensors: Tensor) -> tuple[list[Tensor], int]:
    """Gradients, and how many products the backward pass computes."""
    contexts = partial(create_selective_checkpoint_contexts, policy)
    result = checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts)
    with Products() as products:
        result.sum().backward()
    return [tensor.grad for tensor in tensors], products.count  # type: ignore[misc]


def check_selective(mesh: Any) -> None:
    data = [r(*shape, dtype=torch.float64, seed=seed) for seed, shape in enumerate([(2, 8, 16), (24, 16), (4, 24)])]
    expected, products = selectively(two_layers, Policy(), *(plain(tensor) for tensor in data))
    placements = [Shard(1)], [Replicate()], [Replicate()]
    for each in (placements, ([Replicate()], [Shard(0)], [Shard(1)])):
        policy = Policy()
        tensors = [shardwise.distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(data, each, strict=True)]
        found, count = selectively(two_layers, policy, *tensors)
        assert policy.forward["aten.mm.default"] == 2
        assert count == products == 4  # those of the gradients alone: the saved ones are not computed again
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine), wanted)  # type: ignore[arg-type]


def test_selective_checkpointing_saves_the_products_of_linear_layers() -> None:
    with ranks(4) as mesh:
        check_selective(mesh)


@on_processes
def test_selective_checkpointing_and_flops_on_processes() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    check_selective(mesh)
    for program in (biased, row_parallel):
        assert flops(program, ours(mesh)) == flops(program, plain)


# ---- any mode -------------------------------------------------------------------------------------------------------


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes down the ops on distributed tensors, by name."""

    def __init__(self, kind: type[Tensor]) -> None:
        super().__init__()
        self.kind, self.names = kind, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(its, self.kind) for its in types):
            self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("program", [matrix, biased, column_parallel])
def test_a_mode_sees_what_it_sees_with_pytorchs_own(program: Any) -> None:
    if program in REFUSED:
        pytest.skip("needs PyTorch 2.13")

    def seen(make: Make, kind: type[Tensor]) -> Counter[str]:
        with Seen(kind) as mode:
            program(make).sum().backward()
        return mode.names

    with lone_rank() as mesh:
        wanted = seen(theirs(mesh), torch_tensor.DTensor)
        found = seen(ours(mesh), shardwise.DTensor)
    products = [name for name in wanted if "mm" in name]
    assert products
    assert {name: found[name] for name in products} == {name: wanted[name] for name in products}
    assert not any(name.startswith("shardwise::") for name in found)
