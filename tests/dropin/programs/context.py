"""Context parallel as in PyTorch's tutorial: buffers are sharded along the sequence, attention is that of all of it."""

import checks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 16, 4, 32, 16, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        # Without a bias: the gradient of that of keys is 0 but for rounding, which AdamW would make large.
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.register_buffer("positions", torch.randn(LENGTH, HIDDEN))
        self.layers = nn.Sequential(Attention(), Attention())
        self.output = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.layers(self.tokens(tokens) + self.positions))


def attention(method, causal):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    set_rotate_method(method)
    torch.manual_seed(0)
    originals = [torch.randn(BATCH, HEADS, LENGTH, HIDDEN) for _ in range(3)]
    wanted = [t.clone().requires_grad_() for t in originals]
    expected = F.scaled_dot_product_attention(*wanted, is_causal=causal)
    expected.sin().sum().backward()
    sharded = [t.clone() for t in originals]
    with context_parallel(mesh, buffers=sharded, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(sharded)):
        for t in sharded:
            t.requires_grad_()
        found = F.scaled_dot_product_attention(*sharded, is_causal=causal)
        found.sin().sum().backward()
        found, *gradients = context_parallel_unshard(mesh, [found.detach(), *(t.grad for t in sharded)], [2, 2, 2, 2])
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    for gradient, t in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, t.grad, rtol=1e-4, atol=1e-5)


def loss_of(model, tokens, labels):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(0, 1))


def training():
    """fully_shard over data and context parallel together: the mean over both is the gradient of the mean loss."""
    world = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "cp"))
    flat = world._flatten("dp_cp")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    model, reference = models
    for layer in model.layers:
        fully_shard(layer, mesh=flat)
    fully_shard(model, mesh=flat)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randint(0, VOCABULARY, (2 * BATCH, LENGTH))
        expected = loss_of(reference, batch, batch.roll(-1, 1))
        expected.backward()
        tokens = batch.chunk(2)[world.get_local_rank("dp")].clone()
        labels = tokens.roll(-1, 1)
        with context_parallel(
            world["cp"],
            buffers=[tokens, labels, model.positions],
            buffer_seq_dims=[1, 1, 0],
            no_restore_buffers={tokens, labels},
        ):
            loss = loss_of(model, tokens, labels)
            loss.backward()
        assert model.positions.shape == (LENGTH, HIDDEN)
        loss = loss.detach()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / dist.get_world_size(), expected.detach(), rtol=1e-4, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    checks.run(
        {
            "attention, causal, keys and values by all-gather": lambda _: attention("allgather", True),
            "attention, causal, keys and values by all-to-all": lambda _: attention("alltoall", True),
            "attention, not causal": lambda _: attention("allgather", False),
            "a model trained over dp x cp with fully_shard": lambda _: training(),
        }
    )
