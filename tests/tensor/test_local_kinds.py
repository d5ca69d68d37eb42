"""Local tensors of other kinds: of a tensor subclass, on the meta device, and fake ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.world import RankTensor
from tests.ops.helpers import r, ranks, whole
from tests.processes.pool import on_processes
from tests.worlds import lone_rank

# ---- subclasses -----------------------------------------------------------------------------------------------------


class Scaled(Tensor):
    """Small integers with a scale for each row, as rowwise float8. `detach` and views are not for it."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)  # type: ignore[attr-defined]

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.integers, self.scale, self.note = data, scale, "mine"

    def dequantized(self) -> Tensor:
        return self.integers.to(self.scale.dtype) * self.scale

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Scaled({self.dequantized()!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return torch.mm(*(arg.dequantized() if isinstance(arg, Scaled) else arg for arg in args))
        if func is torch.ops.aten.clone.default:
            return Scaled(args[0].integers.clone(), args[0].scale.clone())
        raise NotImplementedError(f"{func} of Scaled")


def scaled(seed: int = 0) -> Scaled:
    return Scaled(r(2, 4, dtype=torch.int8, seed=seed), r(2, 1, seed=seed))


def test_a_subclass_is_kept() -> None:
    with lone_rank() as mesh:
        local = scaled()
        x = DTensor.from_local(local, mesh, [Shard(0)])
        assert x.shape == (8, 4)
        assert x._local_tensor is local
        assert x.to_local() is local
        product = x @ distribute_tensor(r(4, 3), mesh, [Replicate()])
        torch.testing.assert_close(product.to_local(), local.dequantized() @ r(4, 3))


def test_a_subclass_on_simulated_ranks() -> None:
    with ranks(4) as mesh:
        locals_ = [scaled(rank) for rank in range(4)]
        x = DTensor.from_local(RankTensor(locals_), mesh, [Shard(0)])
        assert all(mine is given for mine, given in zip(x.shards.values(), locals_, strict=True))
        product = x @ distribute_tensor(r(4, 3), mesh, [Replicate()])
        torch.testing.assert_close(whole(product), torch.cat([t.dequantized() for t in locals_]) @ r(4, 3))
        for shard in DTensor.from_local(scaled(), mesh, [Replicate()]).shards.values():
            assert isinstance(shard, Scaled)


@on_processes
def test_a_subclass_on_processes() -> None:
    mesh = init_device_mesh("cpu", (4,))
    local = scaled(dist.get_rank())
    x = DTensor.from_local(local, mesh, [Shard(0)], shape=(8, 4))
    assert x.to_local() is local
    assert x.to_local().note == "mine"  # type: ignore[attr-defined]
    product = x @ distribute_tensor(r(4, 3), mesh, [Replicate()])
    expected = torch.cat([scaled(rank).dequantized() for rank in range(4)]) @ r(4, 3)
    torch.testing.assert_close(product.full_tensor(), expected)


def test_a_plain_tensor_may_require_grad_later() -> None:
    with lone_rank() as mesh:
        local = torch.ones(2, 4)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        local.requires_grad_()
        assert not x.to_local().requires_grad


# ---- meta -----------------------------------------------------------------------------------------------------------


def check_meta(mesh: Any) -> None:
    size = mesh.size()
    for grad in (False, True):
        x = DTensor.from_local(torch.empty(2, 4, device="meta", requires_grad=grad), mesh, [Shard(0)])
        assert x.is_meta
        assert x.shape == (2 * size, 4)
        assert x.to_local().is_meta
        assert (x @ x.mT).sum().is_meta
        assert x.redistribute(placements=[Replicate()]).to_local().shape == (2 * size, 4)
    assert torch.empty_like(x).is_meta
    for made in (torch.empty_like(x, device="cpu"), torch.zeros_like(x, device="cpu")):
        assert made.device.type == "cpu"
        assert made.placements == (Shard(0),)  # type: ignore[attr-defined]
        assert made.to_local().shape == (2, 4)  # type: ignore[attr-defined]
    assert F.dropout(torch.empty_like(x).expand(10_000, 2 * size, 4), 0.5).is_meta


def check_to_empty(mesh: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    distribute_module(model, mesh)
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model:
        module.reset_parameters()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    assert model[0].weight.placements == (Shard(0),)
    with torch.no_grad():
        found = model(distribute_tensor(r(3, 4), mesh, [Replicate()]))
        torch.testing.assert_close(shardwise.world.common(found.full_tensor()), plain(r(3, 4)))
    assert next(iter(model.to("meta").parameters())).is_meta


def test_meta_tensors() -> None:
    with ranks(4) as mesh:
        check_meta(mesh)
        check_to_empty(mesh)
    with lone_rank() as mesh:
        check_meta(mesh)


@on_processes
def test_meta_tensors_on_processes() -> None:
    mesh = init_device_mesh("cpu", (4,))
    check_meta(mesh)
    check_to_empty(mesh)


# ---- fake tensors ---------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return F.linear(x, self.embedding.weight)


def train(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters())
    loss = F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def place(model: Model, mesh: Any) -> Model:
    model.embedding.weight = nn.Parameter(distribute_tensor(model.embedding.weight.detach(), mesh, [Shard(0)]))
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, styles)
    distribute_module(model, mesh)
    return model


def one_step(mesh: Any, rows: int = 8, width: int = 3) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model = place(Model(), mesh)
    tokens = distribute_tensor(torch.randint(0, 16, (rows, width)), mesh, [Replicate()])
    return model, train(model, tokens, tokens)


def check_fake(mesh: Any) -> None:
    with FakeTensorMode():
        x = DTensor.from_local(torch.randn(2, 4).requires_grad_(), mesh, [Shard(0)], run_check=True)
        assert isinstance(x, DTensor)
        assert x.shape == (8, 4)
        x.redistribute(placements=[Shard(1)]).square().sum().backward()
        assert x.full_tensor().shape == (8, 4)
        model, loss = one_step(mesh)
        one_step(mesh, rows=128, width=256)  # so many elements that dropout draws them by index
    fakes = [t for p in model.parameters() for t in p.shards.values()]  # type: ignore[attr-defined]
    assert all(isinstance(t, FakeTensor) for t in fakes)
    assert all(p.grad.placements == p.placements for p in model.parameters())  # type: ignore[attr-defined,union-attr]
    assert loss.shape == ()
    # What was planned with fake tensors serves real ones.
    _, found = one_step(mesh)
    torch.manual_seed(0)
    plain, tokens = Model(), torch.randint(0, 16, (8, 3))
    expected = train(plain, tokens, tokens)
    torch.testing.assert_close(shardwise.world.common(found.full_tensor()), expected)  # type: ignore[attr-defined]


def test_models_under_fake_tensor_mode() -> None:
    with ranks(4) as mesh:
        check_fake(mesh)


@on_processes
def test_models_under_fake_tensor_mode_on_processes() -> None:
    check_fake(init_device_mesh("cpu", (4,)))


@pytest.mark.parametrize("local", [True, False])
def test_styles_under_fake_tensor_mode(local: bool) -> None:
    with lone_rank() as mesh, FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        use = {"use_local_output": local}
        parallelize_module(model, mesh, {"0": ColwiseParallel(**use), "2": RowwiseParallel(**use)})
        result = model(torch.randn(3, 4))
        result.sum().backward()
        assert isinstance(result if local else result.to_local(), FakeTensor)
