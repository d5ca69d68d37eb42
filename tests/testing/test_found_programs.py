"""Short programs that once gave other results than one device."""

import pytest

from shardwise.testing.fuzz import Program
from shardwise.testing.fuzz.processes import compare_rank
from shardwise.testing.fuzz.trial import alone
from tests.processes.pool import on_processes

FOUND = {
    "a change of shape that fails": (
        "x1 = leaf((1, 1, 1), torch.float32, [Replicate()], seed=501, grad=True)",
        "x2 = x1.unbind(-2)[-1]",
        "x1.t_()",
        "x8 = move(x2, [Replicate()])",
    ),
    "a view of a tensor that changes its shape": (
        "x1 = leaf((1, 1), torch.float32, [Replicate()], seed=325, grad=True)",
        "x2 = F.pad(x1, (1, 1))",
        "x3 = x2.squeeze(-1)",
        "x2.unsqueeze_(0)",
        "(x2.cos().sum() + (x3 * 0.5).sum()).backward()",
    ),
    "a view of a leaf changes its shape": (
        "x0 = leaf((1, 1, 2), torch.float32, [Replicate()], seed=17, grad=True)",
        "x4 = x0[-1]",
        "with torch.no_grad(): x4.t_()",
        "((x4 * x4.detach()).sum()).backward()",
    ),
    "a view as out= that takes another shape": (
        "x2 = leaf((1, 1), torch.float32, [Replicate()], seed=914)",
        "x3 = leaf((1, 1, 1), torch.float32, [Replicate()], seed=158)",
        "torch.add(x3, x3, out=x2[...])",
    ),
    "a comparison written to a view of integers": (
        "x1 = leaf((1, 1, 1), torch.int8, [Replicate()], seed=993)",
        "x2 = leaf((), torch.float32, [Replicate()], seed=785, grad=True)",
        "x1.narrow(-2, 0, 1).lt_(x2)",
    ),
    "a leaf changes its shape after it was used": (
        "x1 = leaf((1,), torch.float32, [Replicate()], seed=183, grad=True)",
        "x3 = move(x1, [Replicate()])",
        "with torch.no_grad(): x1.unsqueeze_(0)",
        "x4 = torch.autograd.grad((x3 * x3.detach()).sum() + (x3 * 0.5).sum(), x1, allow_unused=True)[0]",
    ),
    "linear needs its weight for the gradient of its input alone": (
        "x3 = leaf((1, 1), torch.float32, [Replicate()], seed=584, grad=True)",
        "x7 = F.linear(x3.detach() * 2, x3)",
        "with torch.no_grad(): x3.neg_()",
        "((x7 * x7).sum()).backward()",
    ),
    "an integer times a power of a 0-d tensor": (
        "x0 = leaf((1, 1), torch.int64, P(None, None), seed=18)",
        "x1 = leaf((), torch.bfloat16, [Replicate()], seed=557)",
        "x5 = torch.ldexp(x0, x1)",
    ),
    "a loss of mixed dtypes": (
        "x0 = leaf((2,), torch.float64, [Shard(0)], seed=277)",
        "x1 = leaf((2,), torch.float32, [Replicate()], seed=278)",
        'x2 = F.huber_loss(x1, x0, reduction="none")',
        'x3 = F.soft_margin_loss(x1, x0, reduction="none")',
    ),
    "the gradient of a loss of mixed dtypes, with empty shards": (
        "x0 = leaf((1,), torch.float32, [Shard(0)], seed=943)",
        "x1 = leaf((1,), torch.bfloat16, P(None), seed=665, grad=True)",
        'x2 = F.smooth_l1_loss(x0, x1, reduction="none")',
        "(x2.sum()).backward()",
    ),
    "a write to a slice of an expanded slice": (
        "x1 = leaf((2,), torch.int64, [Shard(0)], seed=252)",
        "x2 = x1.tensor_split(3, 0)[1]",
        "x4 = x2.expand([2, 1])",
        "x4[1:] *= 2",
    ),
    "a number minus the transposed of it": (
        "x0 = leaf((2, 2), torch.float32, [Shard(0)], seed=234)",
        "x1 = torch.rsub(x0, x0.mT)",
        "x2 = torch.rsub(x0.mT, x0)",
    ),
    "a complex tensor without elements has no bounds": (
        "x0 = leaf((0, 1), torch.complex64, [Replicate()], seed=738)",
        "x0.flatten().clamp_(-1, 1)",
    ),
    "an integer has no deviation, with empty shards": (
        "x0 = leaf((1,), torch.int64, [Shard(0)], seed=816)",
        "x1 = x0.std(-1)",
    ),
    "terms of a sum divided by zero": (
        'x0 = leaf((4,), torch.float32, [Partial("sum")], seed=349)',
        "x1 = x0 / 2.0",
        "x2 = x0 / 0.0",
        "x0.div_(0)",
    ),
    "random slopes of a transposed tensor": (
        "x0 = leaf((2, 3), torch.float32, [Shard(0)], seed=12, grad=True)",
        "x1 = F.rrelu(x0.mT)",
        "x2 = torch.autograd.grad((x1 * x1).sum(), x0)[0]",
    ),
    "expanded elements are copied to themselves": (
        'x1 = leaf((1, 1, 1), torch.float32, [Partial("max")], seed=985)',
        "x4 = x1.any(2)",
        "x7 = x4.unsqueeze(-1).expand([6, 8, 3])",
        "x7[-5] = x7[1]",
    ),
    "rows are filled in a tensor with gaps": (
        "x0 = leaf((2, 2, 2), torch.int8, [Replicate()], seed=882)",
        "x1 = x0.diagonal()",
        "x2 = x1.index_fill(-2, x1.flatten().abs() % 2, 3)",
    ),
    "an expanded tensor is resized to the size that it has": (
        "x1 = leaf((1, 1), torch.uint8, [Replicate()], seed=133)",
        "x2 = torch.broadcast_to(x1, [2, 1])",
        "x2.resize_([2, 1])",
    ),
    "tensors that are not row-major are resized": (
        "x0 = leaf((2, 4), torch.float32, [Shard(1)], seed=133)",
        "x1 = x0.mT",
        "x1.resize_([2, 2])",
        "x2 = x0[:, 1:3]",
        "x2.resize_([7])",
        "x3 = x0[:, ::2]",
        "x3.resize_([2, 2], memory_format=torch.contiguous_format)",
        "x3.zero_()",
        "x4 = x0[0].expand([3, 4])",
        "x4.resize_([3])",
    ),
    "gradients of attention over a sharded sequence, with and without a graph of them": (
        "x2 = leaf((1, 2, 2, 1), torch.float32, [Shard(2)], seed=703, grad=True)",
        "x5 = F.scaled_dot_product_attention(x2, x2, x2, is_causal=False)",
        "x6 = torch.autograd.grad(x5.mean(), x2, create_graph=True, allow_unused=True)[0]",
        "x7 = torch.autograd.grad(x5.mean(), x2, allow_unused=True)[0]",
    ),
    "a result that does not fit into the memory of a view": (
        "x1 = leaf((1, 1), torch.int64, P(None, 'a'), seed=682)",
        "x5 = x1[1:]",
        "torch.cat([x1, x1], out=x5)",
    ),
    "writes to an expanded tensor that is expanded once more": (
        "x1 = leaf((1, 1, 1, 2), torch.float32, [Shard(0)], seed=893, grad=True)",
        "x2 = torch.autograd.grad(x1.sum(), x1, allow_unused=True)[0]",
        "x8 = x2.expand([3, 3, -1, -1])",
        "x8[x8 > 0] = -1",
        "x9 = x1.detach().expand([3, 3, -1, -1])",
        "x9.masked_fill_(leaf((3, 1, 1, 1), torch.bool, [Replicate()], seed=3), 7)",
    ),
    "attention without features, over a sharded sequence": (
        "x0 = leaf((1, 1, 1, 0), torch.float32, [Shard(2)], seed=522)",
        "x3 = F.scaled_dot_product_attention(x0, x0, x0, is_causal=False)",
        "x4 = leaf((1, 1, 2, 0), torch.float32, [Shard(2)], seed=522, grad=True)",
        "x5 = F.scaled_dot_product_attention(x4, x4, x4, is_causal=True)",
        "x5.sum().backward()",
        "x6 = leaf((1, 2, 2, 0), torch.float32, [Shard(1)], seed=522)",
        "x7 = F.scaled_dot_product_attention(x6, x6, x6)",
        "x8 = leaf((1, 1, 2, 3), torch.float32, [Shard(2)], seed=5)",
        "x9 = F.scaled_dot_product_attention(x4, x4, x8)",
    ),
    "attention of features that are not neighbours in memory": (
        "x0 = leaf((1, 1, 2, 2), torch.float32, [Shard(0)], seed=347)",
        "x2 = x0.permute([3, 2, 0, 1])",
        "x5 = F.scaled_dot_product_attention(x2, x2, x2, is_causal=False)",
        "x6 = leaf((2, 1, 1, 2), torch.float32, [Shard(3)], seed=747)",
        "x7 = x6.movedim(0, -1)",
        "x8 = F.scaled_dot_product_attention(x7, x7, x7, is_causal=True)",
    ),
    "the second derivative of layer_norm in half precision": (
        "x1 = leaf((1, 5), torch.float16, [Shard(0)], seed=591, grad=True)",
        "x2 = F.layer_norm(x1, [5])",
        "x3 = torch.autograd.grad(x2.mean() + (x2 * 0.5).sum(), x1, create_graph=True)[0]",
        "x4 = torch.autograd.grad((x3 ** 2).sum(), x1)[0]",
    ),
    "as_strided that leaves the memory of a sharded tensor": (
        "x2 = leaf((3,), torch.float32, [Shard(0)], seed=903)",
        "x6 = torch.as_strided(x2, (2, 2), (1, 1), 1)",
    ),
    "windows that leave gaps, of a sharded tensor": (
        "x0 = leaf((2, 2, 3), torch.float32, [Shard(1)], seed=316)",
        "x1 = x0.unfold(2, 1, 2)",
    ),
    "an element of an odd stride travels as bytes": (
        "x0 = leaf((1, 8), torch.complex64, [Shard(1)], seed=847)",
        "x1 = x0.unsqueeze(1).diagonal()",
        "x2 = x0[:, ::4].unsqueeze(1).diagonal()",
        "x3 = move(x2, [Replicate()])",
        "x4 = torch.matmul(x0, x1)",
    ),
    "the gradient of vectors without elements": (
        "x0 = leaf((0,), torch.float32, [Replicate()], seed=799, grad=True)",
        "x1 = leaf((2, 3), torch.float32, [Shard(0)], seed=798, grad=True)",
        "x2 = torch.cat([x0, x0])",
        "x3 = torch.cat([x1, x0, x1])",
        "((x2 * x2).sum() + (x0 * 0.5).sum() + (x3 * x3).sum()).backward()",
    ),
    "the second gradient of a write to a view": (
        "x0 = leaf((2,), torch.float32, [Replicate()], seed=305, grad=True)",
        "x1 = x0 * x0",
        "x1.unsqueeze(0).copysign_(x0)",
        "x2 = torch.autograd.grad((x1 * x1).sum(), x0, create_graph=True)[0]",
        "x3 = torch.autograd.grad((x2 * x2).sum(), x0, create_graph=True)[0]",
        "x4 = torch.autograd.grad((x3 * x3).sum(), x0)[0]",
        "x5 = x0 * 2",
        "x5.view(1, 2).cumprod_(1)",
        "x6 = torch.autograd.grad((x5 * x5).sum(), x0, create_graph=True)[0]",
        "x7 = torch.autograd.grad((x6 * x6).sum(), x0)[0]",
    ),
    "a gradient through a view of what was written": (
        "x0 = leaf((2,), torch.float32, [Replicate()], seed=412, grad=True)",
        "x1 = move(x0, [Replicate()])",
        "x2 = x1.unsqueeze(0)",
        "x1.copysign_(0.5)",
        "x3 = torch.autograd.grad(x2.sum(), x1)[0]",
    ),
    "pooling in one dim, with and without gradients": (
        "x0 = leaf((1, 5, 2), torch.float32, [Replicate()], seed=727)",
        "x1 = leaf((2, 5, 2), torch.float32, [Shard(0)], seed=728, grad=True)",
        "x2 = F.max_pool1d(x0.mT, 2)",
        "x3 = F.max_pool1d(x1.mT, 2)",
    ),
    "any view of a conjugate": (
        "x0 = leaf((2, 2), torch.complex64, [Replicate()], seed=776)",
        "x1 = x0.conj()",
        "x2 = torch.as_strided(x1, (2, 2), (1, 1), 1)",
        "x3 = x1.view(-1).as_strided((2,), (2,), 0)",
        "x4 = x1[1].as_strided((2,), (1,), 1)",
        "x3.mul_(2)",
    ),
    "the mean of nothing": (
        "x0 = leaf((1, 0), torch.float32, [Shard(1)], seed=681)",
        "x1, x2 = torch.var_mean(x0, 1)",
        "x3, x4 = torch.std_mean(x0, 1, correction=0)",
    ),
    "batch norm of a dim of one index": (
        "x0 = leaf((1, 1, 2, 2), torch.float32, [Replicate()], seed=559)",
        "x5 = x0.permute([0, 3, 2, 1])",
        "x6 = F.batch_norm(x5, None, None, training=True)",
    ),
    "one number that requires a gradient is filled into integers": (
        "x0 = leaf((1, 1), torch.int64, [Replicate()], seed=664)",
        "x1 = leaf((1,), torch.float32, [Replicate()], seed=988, grad=True)",
        "x0[:, 0] = x1[..., 0]",
        "x2 = leaf((2, 1), torch.bool, [Shard(0)], seed=488)",
        "x2.ravel()[...] = x1.sum()",
        "x3 = leaf((2, 2), torch.int32, [Shard(1)], seed=489)",
        "x3[1:].masked_fill_(x3[1:] > 0, x1.sum())",
        "x4 = leaf((2, 2), torch.int32, [Shard(1)], seed=490)",
        "x4[1:].index_fill_(1, leaf((1,), torch.int64, [Replicate()], seed=3).abs() % 2, x1.sum())",
        "x5 = leaf((2, 2), torch.int64, [Shard(0)], seed=491)",
        "x5.T.bernoulli_((x1 > 0).to(torch.float32) * x1 / x1)",
    ),
    "scores of more rows than targets, with sharded classes": (
        "x0 = leaf((6, 6), torch.float32, [Shard(1)], seed=798, grad=True)",
        "x1 = leaf((1,), torch.int64, [Replicate()], seed=554)",
        "x2 = F.cross_entropy(x0, x1.abs())",
    ),
    "a roll of images with channels last": (
        "x1 = leaf((2, 4, 2), torch.int64, [Shard(0)], seed=836)",
        "x6 = x1.mT.unflatten(2, (2, -1))",
        "x7 = x6.roll(-1, -1)",
        "x8 = x6.roll((1, 1), (0, 2))",
        "x9 = x6.roll(1)",
        "x10 = x6.transpose(0, 3).roll(1, 1)",
    ),
    "the second derivative of attention": (
        "x1 = leaf((1, 1, 1, 1), torch.float32, [Shard(2)], seed=871, grad=True)",
        "x6 = F.scaled_dot_product_attention(x1, x1, x1, is_causal=True)",
        "x8 = torch.autograd.grad((x6 ** 2).mean(), x1, create_graph=True)[0]",
        "(x8.cos().sum()).backward()",
    ),
    "arguments that do not fit": (
        "x0 = leaf((6, 4), torch.float32, [Shard(1)], seed=798, grad=True)",
        "x1 = leaf((1,), torch.float32, [Replicate()], seed=554)",
        "x2 = F.rms_norm(x0, (4,), x1)",
        "x3 = F.rms_norm(x0, (), x1)",
        "x4 = F.linear(x0[0], x0, x0)",
        "x5 = F.linear(x0, x0, x0[:, 0])",
        "x6 = leaf((2, 4), torch.int64, [Shard(1)], seed=9)",
        "x7 = F.embedding(x6, x0.sum())",
        "x8 = x0.tensor_split(x6)",
        "x9 = x0.tensor_split(x6[0].int())",
        "x10 = x0.sum().tensor_split(x6[0])",
        "x11 = F.cross_entropy(x0, x6.flatten().abs()[:6].int() % 4)",
        "x12 = F.cross_entropy(x0, x6.flatten().abs()[:6] % 4, x1)",
    ),
    "results that are not converted to the dtype of out=": (
        "x0 = leaf((1, 2), torch.float64, [Shard(1)], seed=466)",
        "x1 = x0.to(torch.float32, copy=True)",
        "torch.clamp(x1, min=0, out=x0)",
        "torch.mm(x1, x1.T, out=x0.new_empty(0))",
        "torch.softmax(x1, 0, out=x0)",
        "torch.add(x1, x1, out=x0)",
        "x2 = leaf((2,), torch.int64, [Shard(0)], seed=3)",
        "torch.cat([x1, x1], out=x2)",
        "torch.isin(x1, x1, out=x1)",
    ),
    "remainders of integers that out= has no room for": (
        "x0 = leaf((2, 2), torch.int64, [Shard(1)], seed=3)",
        "x1 = x0.new_empty(0)",
        "torch.fmod(x0, x0.abs() + 1, out=x1)",
        "x2 = x0.new_empty(0)",
        "torch.remainder(x0, x0.abs() + 1, out=x2)",
        "x3 = leaf((2, 2), torch.complex64, [Shard(1)], seed=3)",
        "torch.maximum(x3, x3, out=x3.new_empty(0))",
        "x4 = torch.linalg.vector_norm(x3, out=x3.real.new_empty(0))",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_as_on_one_device(name: str) -> None:
    assert alone(Program(1, (2,), FOUND[name]), ()) is None


@on_processes
def test_ranks_agree_on_what_to_communicate() -> None:
    """A rank with an empty shard sees the writes and raises the errors that others do."""
    programs = (
        (
            "x1 = leaf((6, 6), torch.bfloat16, P('b', None), seed=436)",
            "x3 = x1.sigmoid()",
            "x4 = x3.chunk(2, -2)[0]",
            "x5 = x3.T",
            "x5.sign_()",
        ),
        (
            "x0 = leaf((2,), torch.int64, [Shard(0), Shard(0)], seed=816)",
            "x1 = x0.std(-1)",
            "x2 = x0[..., None] @ x0[None]",
        ),
        (
            "x0 = leaf((2, 2), torch.int64, [Shard(0), Shard(0)], seed=664)",
            "x1 = leaf((1,), torch.float32, [Replicate(), Replicate()], seed=988, grad=True)",
            "x0[:, 0] = x1[..., 0]",
            "x0[0].masked_fill_(x0[0] > 0, x1.sum())",
        ),
    )
    compare_rank([Program(1, (1, 4), lines) for lines in programs])
