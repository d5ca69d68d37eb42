"""A small Llama trained as torchtitan trains: tensor and sequence parallel, fully_shard per block, loss parallel."""

from functools import partial

import checks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

HIDDEN, HEADS, KV_HEADS, VOCABULARY, LENGTH, BATCH = 32, 4, 2, 48, 16, 4


def rotation(length, size):
    """Complex numbers by which the pairs of a head are turned, by position."""
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size))
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, turns):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = HIDDEN // HEADS
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, KV_HEADS * self.size, bias=False)
        self.wv = nn.Linear(HIDDEN, KV_HEADS * self.size, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x, turns):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.w2 = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x, turns):
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.register_buffer("turns", rotation(LENGTH, HIDDEN // HEADS), persistent=False)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm = nn.RMSNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def new_model():
    torch.manual_seed(0)
    return Llama()


def tensor_parallel(model, mesh, with_loss_parallel):
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if with_loss_parallel else Replicate(),
                use_local_output=not with_loss_parallel,
            ),
        },
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


def parallelized(mesh, precision, with_loss_parallel):
    model = tensor_parallel(new_model(), mesh["tp"], with_loss_parallel)
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh["dp"], mp_policy=precision, reshard_after_forward=True)
    fully_shard([model.norm, model.output], mesh=mesh["dp"], mp_policy=precision, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=precision)


def loss_of(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten(0, 1))


def step(model, optimizer, tokens, with_loss_parallel=False):
    optimizer.zero_grad()
    if with_loss_parallel:
        with loss_parallel():
            loss = loss_of(model, tokens)
            loss.backward()
    else:
        loss = loss_of(model, tokens)
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
    optimizer.step()
    return tuple(value.full_tensor() if isinstance(value, DTensor) else value for value in (loss.detach(), norm))


def name_on_one_device(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def train(folder, precision, tolerance, with_loss_parallel):
    """Four steps; after two of them the state is saved, and loaded into a model and an optimizer that are new."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = new_model()
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    same = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    data = torch.Generator().manual_seed(1)
    for i in range(4):
        if i % 2 == 0:
            model = parallelized(mesh, precision, with_loss_parallel)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        if i == 2:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=data)
        share = tokens.chunk(2)[mesh["dp"].get_local_rank()]
        loss, norm = step(model, optimizer, share, with_loss_parallel)
        expected, expected_norm = step(reference, reference_optimizer, tokens)
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        same(loss / 2, expected)
        same(norm, expected_norm)
        if i == 1:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    for name, parameter in model.named_parameters():
        same(parameter.full_tensor().float(), reference.get_parameter(name_on_one_device(name)))


if __name__ == "__main__":
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    checks.run(
        {
            "TP x FSDP, float32": partial(
                train, precision=MixedPrecisionPolicy(), tolerance=2e-3, with_loss_parallel=False
            ),
            "TP x FSDP, loss parallel": partial(
                train, precision=MixedPrecisionPolicy(), tolerance=2e-3, with_loss_parallel=True
            ),
            "TP x FSDP, bfloat16, loss parallel": partial(
                train, precision=half, tolerance=0.05, with_loss_parallel=True
            ),
        }
    )
