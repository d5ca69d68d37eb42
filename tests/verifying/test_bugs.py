"""Mistakes that real programs made: each is found by name, and the same program without it raises no alarm."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from .pieces import (
    MLP,
    SumBackward,
    SumForward,
    gather,
    gather_for_parts,
    keep_shard,
    mean_over,
    scatter,
    scatter_sum,
    shard_of,
)

TP, DP = {"mesh": (2,), "names": ("tp",)}, {"mesh": (2,), "names": ("dp",)}
X, Y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1)), torch.randn(2, 4, 4)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


BUGS = {}


def bug(first: str | tuple[str, ...], *words: str):
    """Register a program that takes whether it is broken; `words` stand in the report of the broken one."""

    def register(run):
        BUGS[run.__name__] = (run, first, words)
        return run

    return register


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_found(name):
    run, first, words = BUGS[name]
    report = run(True)
    assert not report.ok
    assert report.first in (first if isinstance(first, tuple) else (first,)), str(report)
    for word in words:
        assert word in " ".join(str(report).split()), str(report)


@pytest.mark.parametrize("name", BUGS)
def test_the_right_program_raises_no_alarm(name):
    report = BUGS[name][0](False)
    assert report.ok, str(report)
    assert report.first is None


# ---- gradients that are not reduced, or too often --------------------------------------------------------------------


@bug("norm.weight", "the gradient of norm.weight", "only the sum over tp is the reference", 'mesh.get_group("tp")')
def norm_weight_under_sequence_parallel(broken):
    """Torchtitan 2387, 4054, 4245: each rank's norm sees some positions, and its weight's gradient is not reduced."""

    def apply(model, mesh):
        model.norm.register_forward_pre_hook(lambda _, args: scatter(args[0], 1, mesh))
        model.norm.register_forward_hook(lambda _, __, output: gather(output, 1, mesh))

    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None and not broken:
            for parameter in model.norm.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        return loss

    return shardwise.verify(lambda: MLP(bias=True), apply, (X, Y), step=step, **TP)


@bug("experts.weight", "ep times too large", "is ep times too large (2 is the size of ep)")
def expert_gradient_scaled_by_ep(broken):
    """Ranks average the loss of their own tokens, and experts sum the gradients of all ranks' tokens."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.mesh = nn.Parameter(torch.randn(2, 4, 4)), None

        def forward(self, x, gates):
            if self.mesh is not None:
                x, gates = gather_for_parts(x, 0, self.mesh), gather_for_parts(gates, 0, self.mesh)
                gates = shard_of(gates, 1, self.mesh, "ep")
            y = torch.einsum("te,edf,td->tf", gates, self.weight, x)
            return y if self.mesh is None else scatter_sum(y, 0, self.mesh)

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(4, 2), Experts()

        def forward(self, x):
            return self.experts(x, self.router(x).softmax(-1))

    def apply(model, mesh):
        model.experts.mesh = mesh
        keep_shard(model.experts, "weight", 0, mesh, "ep")

    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None:
            mean_over([p.grad for p in model.router.parameters()], mesh, "ep")
            if not broken:
                model.experts.weight.grad /= mesh["ep"].size()
        return loss

    def place(batch, mesh):
        return tuple(shard_of(x, 0, mesh, "ep") for x in batch)

    batch = X.flatten(0, 1), Y.flatten(0, 1)
    return shardwise.verify(Mixture, apply, batch, step=step, place=place, mesh=(2,), names=("ep",))


@bug("up.weight", "only the average over dp is the reference")
def gradients_not_averaged_over_dp(broken):
    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None:
            named = model.named_parameters()
            mean_over([p.grad for name, p in named if not (broken and name == "up.weight")], mesh, "dp")
        return loss

    def place(batch, mesh):
        return tuple(shard_of(x, 0, mesh, "dp") for x in batch)

    return shardwise.verify(MLP, lambda model, mesh: None, (X, Y), step=step, place=place, **DP)


@bug("down.weight", "is dp times too small", "once too often")
def loss_averaged_over_dp_twice(broken):
    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        (loss / mesh["dp"].size() if mesh is not None and broken else loss).backward()
        if mesh is not None:
            mean_over([p.grad for p in model.parameters()], mesh, "dp")
        return loss

    def place(batch, mesh):
        return tuple(shard_of(x, 0, mesh, "dp") for x in batch)

    return shardwise.verify(MLP, lambda model, mesh: None, (X, Y), step=step, place=place, **DP)


@bug("down.weight", "is 2 times too large", "it does not depend on the mesh", "the number of microbatches")
def accumulated_gradients_not_divided(broken):
    def step(model, batch, mesh):
        parts = [batch] if mesh is None else [tuple(x[row : row + 1] for x in batch) for row in range(2)]
        total = 0.0
        for x, y in parts:
            loss = mse(model(x), y)
            (loss if broken else loss / len(parts)).backward()
            total = total + loss.detach() / len(parts)
        return total

    return shardwise.verify(MLP, lambda model, mesh: None, (X, Y), step=step, **TP)


@bug("norm.weight", "only the sum over tp is the reference")
def input_gradient_of_a_column_layer_not_reduced(broken):
    """Before a layer whose features are on several ranks, the gradient is a part of a sum."""

    def apply(model, mesh):
        group = mesh.get_group("tp")
        keep_shard(model.up, "weight", 0, mesh, "tp")
        keep_shard(model.up, "bias", 0, mesh, "tp")
        keep_shard(model.down, "weight", 1, mesh, "tp")
        bias = model.down.bias
        model.down.bias = None
        model.down.register_parameter("bias", None)
        model.down_bias = bias
        if not broken:
            model.up.register_forward_pre_hook(lambda _, args: SumBackward.apply(args[0], group))
        model.down.register_forward_hook(lambda _, __, output: SumForward.apply(output, group) + bias)

    return shardwise.verify(MLP, apply, (X, Y), loss=mse, **TP)


# ---- norms of gradients ----------------------------------------------------------------------------------------------


def _tensor_parallel(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


@bug("grad_norm", "counted several times")
def gradient_norm_counted_tp_times(broken):
    """NeMo-RL 3788: squares of replicated gradients are summed over tp like those of sharded ones."""

    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        squares = torch.zeros((), dtype=loss.dtype)
        alone = torch.zeros((), dtype=loss.dtype)
        for parameter in model.parameters():
            gradient = parameter.grad
            sharded = isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)
            square = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).pow(2).sum()
            if sharded or broken:
                squares += square
            else:
                alone += square
        if mesh is not None:
            dist.all_reduce(squares, group=mesh.get_group("tp"))
        return {"loss": loss, "grad_norm": (squares + alone).sqrt()}

    return shardwise.verify(MLP, _tensor_parallel, (X, Y), step=step, **TP)


@bug("grad_norm", "norm of the gradients that it holds itself")
def clipping_by_the_local_norm(broken):
    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        parameters = list(model.parameters())
        if mesh is not None and broken:
            locals_ = [nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p for p in parameters]
            for local, parameter in zip(locals_, parameters, strict=True):
                local.grad = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
            parameters = locals_
        nn.utils.clip_grad_norm_(parameters, 0.1)
        return loss

    return shardwise.verify(MLP, _tensor_parallel, (X, Y), step=step, **TP)


# ---- losses ----------------------------------------------------------------------------------------------------------


@bug("loss", "the loss")
def loss_parallel_with_another_log_softmax(broken):
    """Pytorch 190746: log_softmax over the local classes alone."""

    def apply(model, mesh):
        parallelize_module(model, mesh, {"": ColwiseParallel(use_local_output=False)})

    def loss(logits, target):
        if isinstance(logits, DTensor):
            mesh = logits.device_mesh
            target = DTensor.from_local(target, mesh, [Replicate()])
            if broken:
                logits = DTensor.from_local(F.log_softmax(logits.to_local(), -1), mesh, [Shard(1)])
                return F.nll_loss(logits, target)
        return F.nll_loss(F.log_softmax(logits, -1), target)

    target = torch.tensor([0, 5, 2, 7, 1, 3, 6, 4])
    return shardwise.verify(lambda: nn.Linear(4, 8), apply, (X.flatten(0, 1), target), loss=loss, **TP)


@bug("loss", "a mean of means", "divide by the global count")
def mean_over_an_uneven_batch(broken):
    """Five rows on two ranks: three and two."""

    def step(model, batch, mesh):
        x, y = batch
        if mesh is None or broken:
            loss = mse(model(x), y)
            loss.backward()
            if mesh is not None:
                mean_over([p.grad for p in model.parameters()], mesh, "dp")
            return loss
        count = x.new_zeros(()) + y.numel()
        dist.all_reduce(count, group=mesh.get_group("dp"))
        loss = F.mse_loss(model(x), y, reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        return loss

    def place(batch, mesh):
        return tuple(distribute_tensor(x, mesh, [Shard(0)]).to_local() for x in batch)

    batch = torch.randn(5, 4), torch.randn(5, 4)
    return shardwise.verify(MLP, lambda model, mesh: None, batch, step=step, place=place, **DP)


# ---- activations -----------------------------------------------------------------------------------------------------


@bug("behind", "only the sum over tp is the reference", "Partial", "x.redistribute(placements=[Replicate()])")
def partial_through_to_local_and_from_local(broken):
    """Pytorch 172932: the local part of a sum is taken for the sum."""

    class Behind(nn.Module):
        def forward(self, x):
            if not isinstance(x, DTensor):
                return x
            placements = [Replicate()] if broken else x.placements
            return DTensor.from_local(x.to_local(), x.device_mesh, placements).redistribute(placements=[Replicate()])

    class Model(MLP):
        def __init__(self):
            super().__init__(bias=False)
            self.behind = Behind()

        def forward(self, x):
            y = self.behind(self.down(self.up(x).relu()))
            return x + (y.to_local() if isinstance(y, DTensor) else y)

    def apply(model, mesh):
        plan = {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Partial(), use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        model.norm = nn.Identity()

    def build():
        model = Model()
        model.norm = nn.Identity()
        return model

    return shardwise.verify(build, apply, (X, Y), loss=mse, **TP)


@bug("down", "only the sum over tp is the reference", 'torch.distributed.all_reduce(x, group=mesh.get_group("tp"))')
def forgotten_all_reduce_behind_a_row_layer(broken):
    def apply(model, mesh):
        parallelize_module(
            model,
            mesh,
            {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial() if broken else None)},
        )

    return shardwise.verify(MLP, apply, (X, Y), loss=mse, **TP)


@bug("down", "is tp times too large (2 is the size of tp)", "once too often")
def all_reduce_twice(broken):
    def apply(model, mesh):
        _tensor_parallel(model, mesh)
        if broken:
            group = mesh.get_group("tp")
            model.down.register_forward_hook(lambda _, __, output: SumForward.apply(output, group))

    return shardwise.verify(MLP, apply, (X, Y), loss=mse, mesh=(2, 2), names=("dp", "tp"))


@bug("down", "differs")
def bias_added_on_every_rank(broken):
    """The bias of a row layer is added before the sum over ranks."""

    def apply(model, mesh):
        group = mesh.get_group("tp")
        keep_shard(model.up, "weight", 0, mesh, "tp")
        keep_shard(model.up, "bias", 0, mesh, "tp")
        keep_shard(model.down, "weight", 1, mesh, "tp")
        bias = model.down.bias

        def forward(x):
            if broken:
                return SumForward.apply(F.linear(x, model.down.weight, bias), group)
            return SumForward.apply(F.linear(x, model.down.weight), group) + bias

        model.down.forward = forward
        model.up.register_forward_pre_hook(lambda _, args: SumBackward.apply(args[0], group))

    return shardwise.verify(MLP, apply, (X, Y), loss=mse, **TP)


@bug("out", "the input of out", "the output of qkv is right")
def fused_projection_sharded_as_one_block(broken):
    """[q; k; v] must be sharded block by block: chunk(3) of a contiguous shard mixes them."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
            self.heads = 2

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def apply(model, mesh):
        weight = model.qkv.weight.detach()
        blocks = [weight] if broken else weight.chunk(3)
        model.qkv.weight = nn.Parameter(torch.cat([shard_of(block, 0, mesh, "tp") for block in blocks]))
        keep_shard(model.out, "weight", 1, mesh, "tp")
        model.heads //= mesh["tp"].size()
        group = mesh.get_group("tp")
        model.register_forward_pre_hook(lambda _, args: SumBackward.apply(args[0], group))
        model.out.register_forward_hook(lambda _, __, output: SumForward.apply(output, group))

    return shardwise.verify(Attention, apply, (X, Y), loss=mse, **TP)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.position, self.mlp, self.offset = nn.Embedding(4, 4), MLP(), 0

    def forward(self, x):
        positions = torch.arange(x.shape[1]) + self.offset
        return self.mlp(x + self.position(positions))


@bug("position", "position")
def positions_not_offset_under_context_parallel(broken):
    def apply(model, mesh):
        if not broken:
            model.offset = mesh.get_local_rank("cp") * 2

    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None:
            mean_over([p.grad for p in model.parameters()], mesh, "cp")
        return loss

    def place(batch, mesh):
        return tuple(shard_of(x, 1, mesh, "cp") for x in batch)

    return shardwise.verify(Positions, apply, (X, Y), step=step, place=place, mesh=(2,), names=("cp",))


@bug("attention", "attention")
def causal_mask_not_that_of_the_local_queries(broken):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mesh = None

        def forward(self, q, k, v):
            mask = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).tril()
            if self.mesh is not None:
                k, v = gather_for_parts(k, 1, self.mesh), gather_for_parts(v, 1, self.mesh)
                mask = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).tril()
                mask = mask[: q.shape[1]] if broken else shard_of(mask, 0, self.mesh, "cp")
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.attention = nn.Linear(4, 4), nn.Linear(4, 4), Attention()

        def forward(self, x):
            return self.attention(self.query(x), self.key(x), x)

    def apply(model, mesh):
        model.attention.mesh = mesh

    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None:
            mean_over([p.grad for p in model.parameters()], mesh, "cp")
        return loss

    def place(batch, mesh):
        return tuple(shard_of(x, 1, mesh, "cp") for x in batch)

    return shardwise.verify(Model, apply, (X, Y), step=step, place=place, mesh=(2,), names=("cp",))


# ---- random numbers and state ----------------------------------------------------------------------------------------


@bug("dropout", "zero in other places", "dropout draws another mask")
def dropout_drawn_per_rank(broken):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.linear(x))

    def step(model, batch, mesh):
        torch.manual_seed(7 + (dist.get_rank() if mesh is not None and broken else 0))
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return shardwise.verify(Model, lambda model, mesh: None, (X, Y), step=step, **TP)


@bug("router.bias", "the updated buffer router.bias", "drift apart over dp")
def router_bias_updated_differently_on_ranks(broken):
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.group = nn.Linear(4, 4), None
            self.register_buffer("bias", torch.zeros(4))

        def forward(self, x):
            scores = self.linear(x).sigmoid()
            chosen = (scores + self.bias).argmax(-1)
            load = F.one_hot(chosen, 4).flatten(0, -2).sum(0).to(scores.dtype)
            if self.group is not None and not broken:
                dist.all_reduce(load, group=self.group)
            self.bias += 0.01 * (load.mean() - load).sign()
            return scores.gather(-1, chosen.unsqueeze(-1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router()

        def forward(self, x):
            return x * self.router(x)

    def apply(model, mesh):
        model.router.group = mesh.get_group("dp")

    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None:
            mean_over([p.grad for p in model.parameters()], mesh, "dp")
        return loss

    def place(batch, mesh):
        return tuple(shard_of(x, 0, mesh, "dp") for x in batch)

    batch = torch.randn(6, 5, 4), torch.randn(6, 5, 4)
    return shardwise.verify(Model, apply, batch, step=step, place=place, **DP)


@bug(("1", "output"), "dp")
def batch_statistics_of_the_local_batch(broken):
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def apply(model, mesh):
        if not broken:
            distribute_module(model, mesh)

    def step(model, batch, mesh):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None and broken:
            mean_over([p.grad for p in model.parameters()], mesh, "dp")
        return loss

    def place(batch, mesh):
        sharded = tuple(distribute_tensor(x, mesh, [Shard(0)]) for x in batch)
        return tuple(x.to_local() for x in sharded) if broken else sharded

    batch = X.flatten(0, 1), Y.flatten(0, 1)
    return shardwise.verify(build, apply, batch, step=step, place=place, **DP)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@bug("embed.weight", "tied on one device, but not on ranks: embed.weight and head.weight")
def tied_embeddings_untied(broken):
    def apply(model, mesh):
        if broken:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    batch = torch.tensor([1, 2, 3, 4]), torch.tensor([2, 3, 4, 5])
    return shardwise.verify(Tied, apply, batch, loss=F.cross_entropy, **TP)


@bug("norm.weight", "the updated parameter norm.weight", "weight decay")
def weight_decay_applied_twice(broken):
    def step(model, batch, mesh, optimizer):
        loss = mse(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh is not None and broken:
            with torch.no_grad():
                model.norm.weight *= 1 - 0.1 * 0.01
        return loss

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.01)

    return shardwise.verify(MLP, lambda model, mesh: None, (X, Y), step=step, optimizer=adamw, **TP)


@bug("norm.weight", "the initial value of norm.weight", "seed all ranks alike")
def parameter_initialised_differently_on_ranks(broken):
    def build():
        model = MLP()
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(3 + (rank if broken else 0))
        nn.init.normal_(model.norm.weight)
        return model

    return shardwise.verify(build, lambda model, mesh: None, (X, Y), loss=mse, **TP)


@bug("norm", "in another order")
def sequence_parallel_norm_of_another_dim(broken):
    """The norm takes its input for sharded in the batch, and gets it sharded in the sequence."""

    def apply(model, mesh):
        model.norm.register_forward_pre_hook(lambda _, args: scatter(args[0], 1, mesh))
        model.norm.register_forward_hook(lambda _, __, output: gather(output, 0 if broken else 1, mesh).view_as(X))
        for parameter in model.norm.parameters():
            parameter.register_hook(lambda grad: SumForward.apply(grad, mesh.get_group("tp")))

    return shardwise.verify(MLP, apply, (X, Y), loss=mse, **TP)


@bug("norm.weight", "is tp times too large (2 is the size of tp)", "summed twice over tp")
def sequence_parallel_style_for_a_whole_sequence(broken):
    """The style sums over tp the gradient of a norm that sees the whole sequence on every rank."""

    def apply(model, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if broken:
            plan["norm"] = SequenceParallel(use_local_output=True)
        parallelize_module(model, mesh, plan)

    return shardwise.verify(MLP, apply, (X, Y), loss=mse, **TP)
