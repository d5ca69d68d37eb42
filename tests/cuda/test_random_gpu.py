"""Random numbers on a GPU: the bits of the CPU, in one pass, without waiting for the device. Skipped without a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import InterleavedShard, Replicate, Shard, init_device_mesh
from shardwise.random import triton_fill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (600, 202)  # above the size up to which PyTorch draws the global tensor
PLACEMENTS = {
    "replicated": [Replicate(), Replicate()],
    "rows": [Shard(0), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)],
    "odd columns": [Shard(1), Shard(1)],
    "interleaved": [InterleavedShard(1, 2), Replicate()],
}
FILLS = {
    "uniform": lambda t, g: t.uniform_(generator=g),
    "uniform in a range": lambda t, g: t.uniform_(-2.5, 3.75, generator=g),
    "normal": lambda t, g: t.normal_(generator=g),
    "normal with": lambda t, g: t.normal_(0.3, 1.7, generator=g),
    "bernoulli": lambda t, g: t.bernoulli_(0.3, generator=g),
    "integers": lambda t, g: t.random_(-3, 1000, generator=g),
    "many integers": lambda t, g: t.random_(0, 1 << 22, generator=g),
}


def drawn(fill, device, placements, dtype=torch.float32, shape=SHAPE) -> torch.Tensor:
    """The global tensor that a mesh of this device draws from one generator of the CPU."""
    with shardwise.simulate(4):
        mesh = init_device_mesh(device, (2, 2))
        made = shardwise.zeros(*shape, device_mesh=mesh, placements=placements, dtype=dtype)
        value = fill(made, torch.Generator().manual_seed(7)).full_tensor()
    return shardwise.world.common(value).cpu()


@pytest.mark.parametrize("sharding", PLACEMENTS)
@pytest.mark.parametrize("name", FILLS)
def test_the_bits_of_the_cpu(name, sharding) -> None:
    expected = drawn(FILLS[name], "cpu", [Replicate(), Replicate()])
    assert torch.equal(drawn(FILLS[name], "cuda", PLACEMENTS[sharding]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", ["uniform", "normal", "bernoulli", "integers"])
def test_dtypes(name, dtype) -> None:
    if not dtype.is_floating_point and name in ("uniform", "normal"):
        pytest.skip("no fractions among integers")
    if dtype == torch.uint8 and name == "integers":
        pytest.skip("out of its range")
    expected, found = (drawn(FILLS[name], device, PLACEMENTS["rows and columns"], dtype) for device in ("cpu", "cuda"))
    if dtype == torch.float64 and name == "normal":
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FILLS)
def test_with_and_without_triton(name, monkeypatch) -> None:
    with_it = drawn(FILLS[name], "cuda", PLACEMENTS["rows and columns"])
    monkeypatch.setattr(triton_fill, "kernels", None)
    assert torch.equal(drawn(FILLS[name], "cuda", PLACEMENTS["rows and columns"]), with_it)


def test_triton_is_there() -> None:
    assert triton_fill.kernels is not None


@pytest.mark.parametrize("shape", [SHAPE, (8, 5)])
def test_the_stream_is_the_gpus_generator(shape) -> None:
    found = []
    for placements in PLACEMENTS.values():
        with shardwise.simulate(4):
            mesh = init_device_mesh("cuda", (2, 2))
            torch.cuda.manual_seed(3)
            x = shardwise.randn(
                *shape, device_mesh=mesh, placements=placements if shape == SHAPE else [Shard(0), Shard(1)]
            )
            state = torch.cuda.get_rng_state()
            y = torch.rand_like(x).full_tensor()
            torch.cuda.set_rng_state(state)
            again = torch.rand_like(x).full_tensor()
            assert torch.equal(y, again)
            found.append((x.full_tensor(), y, torch.rand(3, device="cuda")))
    for values in found[1:]:
        for value, first in zip(values, found[0], strict=True):
            assert torch.equal(value, first)
    assert not torch.equal(found[0][0], found[0][1])


def test_drawing_does_not_wait_for_the_device() -> None:
    with shardwise.simulate(2):
        mesh = init_device_mesh("cuda", (2,))
        x = shardwise.ones(512, 512, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)

        def work() -> None:
            F.dropout(torch.randn_like(x) * x, 0.1).sum().backward()
            torch.rand_like(x).bernoulli_(0.5)

        work()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharding", PLACEMENTS)
def test_dropout(sharding, dtype) -> None:
    found = []
    for placements in (PLACEMENTS["replicated"], PLACEMENTS[sharding]):
        with shardwise.simulate(4):
            mesh = init_device_mesh("cuda", (2, 2))
            x = shardwise.ones(*SHAPE, device_mesh=mesh, placements=placements, dtype=dtype).requires_grad_()
            torch.manual_seed(1)
            y = F.dropout(x, 0.1)
            y.backward(torch.ones_like(y))
            assert torch.equal(x.grad.full_tensor(), y.full_tensor())
            found.append(y.detach().full_tensor())
    assert torch.equal(*found)
    kept = (found[0] != 0).float().mean().item()
    assert abs(kept - 0.9) < 0.005
    assert set(found[0].unique().tolist()) == {0.0, torch.tensor(1 / 0.9, dtype=dtype).item()}


def test_dropout_draws_the_mask_of_the_cpu() -> None:
    """The fused kernel and `bernoulli_` on the CPU give the same mask for the same key."""
    from shardwise.random.bits import Key
    from shardwise.random.box import Box
    from shardwise.random.fill import fill

    key = Key(123456789123456789, -987654321987654321)
    for box in (Box(0, (1 << 20,), (1,)), Box(7, (1001, 33), (101, 1)), Box(6, (64, 4, 6), (1000, 100, 1))):
        x = torch.randn(box.sizes, device="cuda")
        expected = fill(torch.empty(box.sizes), box, key, "bernoulli_", (0.9,)).bool()
        result = triton_fill.dropout(x, box, key, 0.1)
        assert result is not None
        assert torch.equal(result[1].cpu(), expected)
        torch.testing.assert_close(result[0].cpu(), x.cpu() * expected / 0.9)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_again(reentrant) -> None:
    def forward(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(t, 0.5) * t

    with shardwise.simulate(2):
        mesh = init_device_mesh("cuda", (2,))
        gradients = []
        for run in (forward, lambda t: checkpoint(forward, t, use_reentrant=reentrant)):
            x = shardwise.ones(*SHAPE, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
            torch.manual_seed(0)
            run(x).sum().backward()
            gradients.append(x.grad.full_tensor())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_with_dropout(dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype) for _ in range(3))
    found = []
    for placements in ([Replicate(), Replicate()], [Shard(0), Shard(1)], [Shard(1), Replicate()]):
        with shardwise.simulate(4):
            mesh = init_device_mesh("cuda", (2, 2))
            inputs = [shardwise.distribute_tensor(t, mesh, placements).requires_grad_() for t in (q, k, v)]
            torch.manual_seed(5)
            out = F.scaled_dot_product_attention(*inputs, dropout_p=0.2, is_causal=True)
            out.float().square().sum().backward()
            found.append([out.detach().full_tensor(), *(t.grad.full_tensor() for t in inputs)])
    for other in found[1:]:
        for value, first in zip(other, found[0], strict=True):
            torch.testing.assert_close(value, first, rtol=2e-2, atol=2e-2)
