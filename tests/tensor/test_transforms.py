"""The transforms of torch.func on distributed tensors, and on modules whose styles call from_local inside."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import shardwise
from shardwise import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from shardwise._torch import pytree
from shardwise.errors import MixedTensorError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.ops.helpers import r, ranks
from tests.processes.pool import on_processes

X, W, B = (r(*shape, dtype=torch.float64, seed=i) for i, shape in enumerate([(8, 6), (5, 6), (5,)]))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch loads its forward derivatives with a function that it has deprecated
    jvp(torch.sin, (X,), (X,))
TOKENS = torch.randint(0, 5, (8, 3), generator=torch.Generator().manual_seed(0))


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).sin()


def loss(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w).tanh().square().sum()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "grad": lambda x, w, b, t: grad(loss)(w, x),
    "grad and value": lambda x, w, b, t: grad_and_value(loss, argnums=(0, 1))(w, x),
    "grad of grad": lambda x, w, b, t: grad(lambda v: grad(lambda u: u.pow(4).sum())(v).sin().sum())(x),
    "vjp": lambda x, w, b, t: vjp(layer, x, w, b)[1](layer(x, w, b)),
    "jvp": lambda x, w, b, t: jvp(lambda v: layer(v, w, b), (x,), (x.cos(),)),
    "jvp of weights": lambda x, w, b, t: jvp(lambda w, b: layer(x, w, b), (w, b), (w, b)),
    "jvp of a norm": lambda x, w, b, t: jvp(lambda v: F.layer_norm(v, (6,)), (x,), (x.cos(),)),
    "jacrev": lambda x, w, b, t: jacrev(lambda v: F.linear(v, w).sum(0))(x),
    "jacfwd": lambda x, w, b, t: jacfwd(lambda v: v.square().sum(0))(x),
    "hessian": lambda x, w, b, t: hessian(lambda v: v.pow(3).sum())(b),
    "vmap": lambda x, w, b, t: vmap(layer, in_dims=(0, None, None))(x, w, b),
    "vmap of an embedding": lambda x, w, b, t: vmap(F.embedding, in_dims=(0, None))(t, w),
    "grad of an embedding": lambda x, w, b, t: grad(lambda w: F.embedding(t, w).square().sum())(w),
    "per sample": lambda x, w, b, t: vmap(grad(loss), in_dims=(None, 0))(w, x),
}


def value_of(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        tensor = tensor.detach().full_tensor()
    return shardwise.world.common(tensor.detach()) if isinstance(tensor, Tensor) else tensor


def assert_same(found: Any, expected: Any) -> None:
    mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(value_of(a), b)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    expected = FUNCTIONS[name](X, W, B, TOKENS)
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
        with ranks(4) as mesh:
            x, w, b, t = (distribute_tensor(v, mesh, [placements[i % 3 > 0]]) for i, v in enumerate((X, W, B, TOKENS)))
            found = FUNCTIONS[name](x, w, b, t)
            assert all(isinstance(tensor, DTensor) for tensor in pytree.tree_leaves(found))
            assert_same(found, expected)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()


def gradients(module: nn.Module, x: Tensor) -> Any:
    parameters = dict(module.named_parameters())
    return grad(lambda p, v: functional_call(module, p, (v,)).square().sum(), argnums=(0, 1))(parameters, x)


def check_modules(mesh: Any) -> None:
    expected = gradients(model(), X)
    distributed = distribute_module(model(), mesh)
    assert_same(gradients(distributed, distribute_tensor(X, mesh, [Shard(0)])), expected)
    for local in (True, False):
        use = {"use_local_output": local}
        styled = parallelize_module(model(), mesh, {"0": ColwiseParallel(**use), "2": RowwiseParallel(**use)})
        assert_same(gradients(styled, X), expected)
        assert_same(gradients(styled, distribute_tensor(X, mesh, [Replicate()])), expected)
        assert_same(jvp(styled, (X,), (X.cos(),)), jvp(model(), (X,), (X.cos(),)))
        assert_same(vmap(styled)(X), model()(X))


def test_modules() -> None:
    with ranks(4) as mesh:
        check_modules(mesh)


@on_processes
def test_modules_on_processes() -> None:
    check_modules(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))


def test_an_embedding_with_a_style_under_vmap() -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(5, 4)
    with ranks(4) as mesh:
        for style in (RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())):
            styled = parallelize_module(copy.deepcopy(plain), mesh, style)
            assert_same(vmap(styled)(TOKENS), plain(TOKENS).detach())


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_from_local(placement: Placement) -> None:
    def norm(local: Tensor) -> Tensor:
        return DTensor.from_local(local, mesh, [placement], run_check=False).pow(3).sum()

    with ranks(4) as mesh:
        local = r(4, 2, dtype=torch.float64)
        leaf = local.clone().requires_grad_()
        norm(leaf).backward()
        assert_same(grad(norm)(local), leaf.grad)
        value, tangent = jvp(norm, (local,), (torch.ones_like(local),))
        assert_same(value, value_of(norm(local)))
        copies = 1 if isinstance(placement, Replicate) else 4
        torch.testing.assert_close(value_of(tangent), 3 * copies * local.square().sum())
        batch = torch.stack([local, 2 * local])
        for in_dim in (0, 1):
            sums = vmap(norm, in_dims=in_dim)(batch.movedim(0, in_dim))
            torch.testing.assert_close(value_of(sums), copies * batch.pow(3).sum((1, 2)))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_the_ops_by_which_forward_derivatives_find_shapes(name: str) -> None:
    op = getattr(torch.ops.prims, name).default
    with ranks(3) as mesh, torch.no_grad():
        for one, other in ((Shard(0), Shard(0)), (Shard(1), Replicate()), (Replicate(), Shard(0))):
            found = op(distribute_tensor(X, mesh, [one]), distribute_tensor(X.cos(), mesh, [other]))
            assert_same(found, op(X, X.cos()))


def test_vmap_of_embeddings_with_a_table_each() -> None:
    indices, tables = torch.randint(5, (4, 6)), torch.randn(4, 5, 3)
    wanted = torch.vmap(F.embedding)(indices, tables)
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Replicate()):
            i, t = distribute_tensor(indices, mesh, [placement]), distribute_tensor(tables, mesh, [placement])
            assert torch.equal(torch.vmap(F.embedding)(i, t).full_tensor(), wanted)
            with pytest.raises(MixedTensorError):  # from outside: not known to be replicated
                torch.vmap(F.embedding)(indices, t)
