"""Gradients of per-rank tensors, against autograd on each rank's own tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.world import RankTensor, replicate

N = 3
ROWS = {"even": (2, 2, 2), "uneven": (3, 2, 1), "empty": (3, 2, 0)}

# x: (rows, 4), float64; w: (4, 4), the same on all ranks; t: (rows,), long.
CODE = [
    "x.mean()",
    "x.mean(0)",
    "x.mean(1)",
    "x.sum()",
    "x.sum(0) * 2",
    "x.var(1)",
    "x.std(1, keepdim=True)",
    "x.norm()",
    "x.view(-1) ** 2",
    "x.view(x.shape[0], 2, 2).transpose(0, 1).sum(1)",
    "x.reshape(-1, 2).exp()",
    "x.flatten().cumsum(0)",
    "x.t().contiguous() @ x",
    "x @ w",
    "F.linear(x, w, w[0])",
    "torch.einsum('ij,kj->ik', x, x)",
    "F.layer_norm(x, (4,), w[0], w[1])",
    "F.rms_norm(x, (4,), w[0])",
    "F.softmax(x, 0)",
    "F.softmax(x, 1)",
    "F.log_softmax(x, -1).sum(0)",
    "torch.cat([x, x * 2], 0)",
    "torch.cat([x, w], 0).tanh()",
    "torch.stack([x, x.sin()], 1)",
    "x[:, 1:3] * 2",
    "x[1:]",
    "x[:, 0].exp()",
    "x[..., ::2]",
    "x.chunk(2, 1)[1]",
    "x.unsqueeze(1).expand(-1, 2, -1).sum(1)",
    "x.repeat(2, 1)",
    "x + x.mean(0, keepdim=True)",
    "x * w[0]",
    "x / (x.abs().sum() + 1)",
    "x.gather(1, t.unsqueeze(1))",
    "w[t] * x",
    "F.embedding(t, w)",
    "torch.where(x > 0, x, x * 2)",
    "x.masked_fill(x > 0, 1.0)",
    "F.gelu(x)",
    "F.mse_loss(x, x.detach() * 2)",
    "F.mse_loss(x, x.detach() * 2, reduction='sum')",
    "F.l1_loss(x, x.detach() * 2)",
    "F.cross_entropy(x, t)",
    "F.cross_entropy(x, t, reduction='sum', label_smoothing=0.1)",
    "F.cross_entropy(x, F.softmax(x.detach() * 2, -1))",
    "F.nll_loss(x, t)",
    "F.binary_cross_entropy_with_logits(x, torch.sigmoid(x.detach()))",
    "F.pad(x, (1, 1))",
    "x.roll(1, 0)",
    "x.flip(0)",
    "x.logsumexp(1)",
    "x.pow(2).sum().sqrt()",
    "x.index_select(1, torch.tensor([1, 1]))",
    "x.as_strided((x.shape[0], 2), (4, 1), 1)",
    "F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])",
    "checkpoint(lambda x: (x @ w).relu(), x, use_reentrant=False)",
    "x.tril()",
    "x.prod(1)",
    "x.clamp(-1, 1)",
    "x.max(1)[0]",
    "x.max(0)[0]",
    "x.amax(1)",
    "x.sort(1)[0]",
    "x.sort(0)[0]",
    "x.topk(2, 1)[0]",
    "x.topk(1, 0)[0]",
    "x.unbind(1)[0]",
    "x.split([1, 3], 1)[0]",
    "x[x > 0]",
    "x.diagonal()",
    "x.unfold(1, 2, 1)",
    "x.unfold(0, 1, 1)",
    "x.scatter(1, t.unsqueeze(1), 2.0)",
    "x.cumprod(1)",
    "x.median(1)[0]",
    "F.conv1d(x[:, None], w[None, :1, :3])",
    "F.avg_pool1d(x[:, None], 2)",
    "F.max_pool1d(x[:, None], 2)",
    "F.group_norm(x, 2, w[0], w[1])",
    "torch.bmm(x[:, None], x[:, :, None])",
    "torch.outer(x[:, 0], x[:, 1])",
    "torch.addmm(w[0], x, w)",
    "torch.baddbmm(w[:1, None], x[:, None], w.expand(x.shape[0], 4, 4))",
    "x.T.softmax(-1)",
    "F.normalize(x)",
    "F.cosine_similarity(x, x * 2 + 1)",
    "torch.cdist(x, w)",
    "x.movedim(0, 1).reshape(2, -1)",
    "F.kl_div(x, F.softmax(x.detach(), 1), reduction='batchmean')",
    "F.one_hot(t, 4) * x",
    "F.huber_loss(x, x.detach() * 3)",
    "x[:, None].expand(-1, 3, -1) @ w",
    "F.linear(x[:, None].repeat(1, 3, 1), w)",
    "F.linear(x[:, None].repeat(1, 3, 1), w, w[0])",
    "x.view(-1, 2, 2) @ x.view(-1, 2, 2)",
]

# Not on empty tensors: these kernels raise there, or die, on a plain tensor as well.
NOT_EMPTY = ("F.scaled_dot_product_attention", "x.max(0)", "x.topk(1, 0)", "x.unfold(0")

# Before 2.13 PyTorch asks for one size in these, and is refused.
NEEDS_2_13 = (
    "F.cross_entropy(x, F.softmax",
    "x[:, None].expand(-1, 3, -1) @ w",
    "F.linear(x[:, None].repeat(1, 3, 1), w)",
    "x.view(-1, 2, 2) @",
)
OLDER = torch.__version__ < (2, 13)


def evaluate(code: str, x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return eval(code, {"torch": torch, "F": F, "checkpoint": checkpoint, "x": x, "w": w, "t": t})


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("code", CODE)
def test_gradients(code: str, rows: str) -> None:
    if rows == "empty" and code.startswith(NOT_EMPTY):
        pytest.skip("no such call on an empty tensor")
    if rows != "even" and OLDER and code.startswith(NEEDS_2_13):
        pytest.skip("needs PyTorch 2.13")
    xs = [torch.randn(n, 4, dtype=torch.float64) for n in ROWS[rows]]
    w = torch.randn(4, 4, dtype=torch.float64)
    ts = [torch.randint(4, (n,)) for n in ROWS[rows]]
    x, rank_w, t = RankTensor(xs).requires_grad_(), replicate(w, N).requires_grad_(), RankTensor(ts)
    got = evaluate(code, x, rank_w, t)
    (got * 0.5 + got**2).sum().backward()
    for rank in range(N):
        local_x, local_w = xs[rank].clone().requires_grad_(), w.clone().requires_grad_()
        want = evaluate(code, local_x, local_w, ts[rank])
        (want * 0.5 + want**2).sum().backward()
        torch.testing.assert_close(got.shards[rank], want.detach(), equal_nan=True)
        for mine, one in ((x, local_x), (rank_w, local_w)):
            assert (mine.grad is None) == (one.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(mine.grad.shards[rank], one.grad, equal_nan=True)


@pytest.mark.parametrize(
    "code",
    [
        "x.squeeze(0)",  # another number of dims on the rank with one row
        "torch.block_diag(x, x)",
        "x.quantile(0.5, dim=1)",
        "F.interpolate(x[:, None], scale_factor=2.0)",
        "x[:2] + torch.zeros(x.shape)",
    ],
)
def test_what_cannot_be_done_with_uneven_shards_is_refused(code: str) -> None:
    x = RankTensor([torch.randn(n, 4) for n in ROWS["uneven"]], requires_grad=True)
    with pytest.raises(RuntimeError):
        evaluate(code, x, x, x)


def per_rank(module: nn.Module) -> nn.Module:
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(replicate(p, N)))
    return module


@pytest.mark.parametrize("rows", ["even", "uneven"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_transformer_layer(rows: str, dropout: float) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, dtype=torch.float64)

    if rows == "uneven" and dropout:
        pytest.skip("ranks that draw different amounts of random numbers differ afterwards, as processes do")
    if rows == "uneven" and OLDER:
        pytest.skip("needs PyTorch 2.13")
    xs = [torch.randn(n, 5, 8, dtype=torch.float64) for n in ROWS[rows]]
    layer, x = per_rank(make()), RankTensor(xs).requires_grad_()
    torch.manual_seed(7)
    got = layer(x)
    got.pow(2).mean().backward()
    for rank in range(N):
        plain, local = make(), xs[rank].clone().requires_grad_()
        torch.manual_seed(7)
        want = plain(local)
        want.pow(2).mean().backward()
        torch.testing.assert_close(got.shards[rank], want.detach())
        torch.testing.assert_close(x.grad.shards[rank], local.grad)
        for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.shards[rank], q.grad)


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_adamw(how: dict[str, bool]) -> None:
    def train(module: nn.Module, x: torch.Tensor) -> nn.Module:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **how)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 100.0)
            optimizer.step()
        return module

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).double()

    xs = [torch.randn(n, 4, dtype=torch.float64) for n in ROWS["uneven"]]
    module = train(per_rank(make()), RankTensor(xs))
    for rank in range(N):
        plain = train(make(), xs[rank])
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.shards[rank], q.detach())


def test_gradient_accumulation_and_hooks() -> None:
    x = RankTensor([torch.ones(n, 2) for n in (3, 2, 1)]).requires_grad_()
    seen = []
    x.register_hook(lambda g: seen.append(type(g)))
    x.sum().backward()
    first = x.grad
    x.sum().backward()
    assert x.grad is first
    assert (x.grad == 2).all().item()
    assert seen == [RankTensor, RankTensor]
    x.grad = None
    (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    g.sum().backward()
    assert (x.grad == 6).all().item()


def test_plain_parameters_get_per_rank_gradients() -> None:
    layer = nn.Linear(4, 2)
    x = RankTensor([torch.randn(n, 4) for n in (3, 2, 1)])
    layer(x).sum().backward()
    for rank in range(N):
        torch.testing.assert_close(layer.weight.grad.shards[rank], x.shards[rank].sum(0).expand(2, 4))


def test_autocast() -> None:
    x, w = RankTensor([torch.randn(n, 4) for n in (3, 2, 1)]), replicate(torch.randn(4, 4), N)
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    assert y.dtype == y.shards[0].dtype == torch.bfloat16
