"""Strides of results: the model of an op's record against what PyTorch does, for many small shapes and strides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise._torch.ops import OpOverload
from shardwise.dispatch.result_meta import result_metas
from shardwise.dispatch.result_strides import with_real_strides
from shardwise.ops.registry import resolve
from shardwise.sharding.memory_order import TensorMeta

aten = torch.ops.aten
F32, F16, I64, BOOL, C64 = torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64


def _strides(shape: Sequence[int]) -> set[tuple[int, ...]]:
    """Strides in all orders of the dims, with each dim expanded, or all."""
    found = {(0,) * len(shape)}
    for order in itertools.permutations(range(len(shape))):
        stride, step = [0] * len(shape), 1
        for dim in order:
            stride[dim], step = step, step * shape[dim]
        found.add(tuple(stride))
        found |= {tuple(0 if dim == expanded else step for dim, step in enumerate(stride)) for expanded in order}
    return found


PLACED = [(shape, stride) for shape in itertools.product((1, 2), repeat=3) for stride in sorted(_strides(shape))]
PLACED += [((4, 4, 1), (4, 1, 1)), ((4, 1, 4), (1, 1, 4)), ((4, 4, 4), (1, 4, 16)), ((3, 2), (1, 3)), ((), ())]


def _zeros(value: Any) -> Any:
    if isinstance(value, list):
        return [_zeros(element) for element in value]
    return (
        torch.zeros(64, dtype=value.dtype).as_strided(value.shape, value.stride)
        if isinstance(value, TensorMeta)
        else value
    )


def _that_matter(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _wrong(func: OpOverload, calls: Iterator[list[Any]] | list[list[Any]], **kwargs: Any) -> list[object]:
    """The calls whose results have other strides than the model says, of those that PyTorch takes."""
    wrong, count = [], 0
    for args in calls:
        try:
            wanted = func(*_zeros(args), **kwargs)
        except (RuntimeError, IndexError):
            continue  # shapes that do not broadcast, dtypes that do not go together
        found = with_real_strides(resolve(func), args, kwargs, result_metas(func, args, kwargs))
        count += 1
        if _that_matter(found) != _that_matter(wanted):
            wrong.append((args, wanted.stride(), found.stride()))
    assert count
    return wrong


def _metas(placed: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
    return [
        TensorMeta(torch.Size(shape), stride, dtype) for (shape, stride), dtype in zip(placed, dtypes, strict=False)
    ]


def test_all_pairs() -> None:
    """Broadcast dims, dims of size 1 and expanded dims, in every order."""
    pairs = (_metas(pair, (F32, F32)) for pair in itertools.product(PLACED, repeat=2))
    assert not _wrong(aten.add.Tensor, pairs, alpha=2)


_SAMPLED: list[tuple[OpOverload, int, dict[str, Any]]] = [
    *((func, 2, {"alpha": 2}) for func in (aten.add.Tensor, aten.sub.Tensor)),
    *((func, 2, {}) for func in (aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.eq.Tensor)),
    *((func, 2, {}) for func in (aten.atan2.default, aten.pow.Tensor_Tensor, aten.clamp.Tensor, aten.complex.default)),
    *((func, 3, {}) for func in (aten.addcmul.default, aten.addcdiv.default, aten.clamp.Tensor, aten.lerp.Tensor)),
    *((func, 2, {}) for func in (aten.rsub.Tensor, aten.ldexp.Tensor, aten._prelu_kernel.default)),
    *((func, 2, {"reduction": 0}) for func in (aten.mse_loss.default, aten.smooth_l1_loss.default)),
    *((func, 2, {"reduction": 0}) for func in (aten.huber_loss.default, aten.soft_margin_loss.default)),
    (aten.threshold_backward.default, 2, {"threshold": 0.5}),
    (aten.leaky_relu_backward.default, 2, {"negative_slope": 0.5, "self_is_result": False}),
    (aten.mse_loss_backward.default, 3, {"reduction": 0}),
    (aten.soft_margin_loss_backward.default, 3, {"reduction": 0}),
    *((func, 1, {}) for func in (aten.angle.default, aten.abs.default, aten.poisson.default, aten.neg.default)),
]


@pytest.mark.parametrize(("func", "count", "kwargs"), _SAMPLED, ids=lambda value: str(value))
def test_dtypes(func, count, kwargs) -> None:
    """Operands that are converted are copied first; half precision and complex numbers have formulas of their own."""
    draw = random.Random(0)
    dtypes = [(F32, F32), (F16, F16), (I64, I64), (F32, F16), (F16, F32), (I64, F32), (F32, BOOL), (C64, F32)]
    calls = [
        _metas([draw.choice(PLACED) for _ in range(count)], (*pair, pair[1])) for pair in dtypes for _ in range(60)
    ]
    if func is aten.poisson.default:
        calls = [call for call in calls if call[0].dtype.is_floating_point]
    assert not _wrong(func, calls, **kwargs)


def test_large_operands() -> None:
    """They are not run: small ones, whose dims have the same order, show the strides."""
    shape = torch.Size((300, 2, 400))
    for order in itertools.permutations(range(3)):
        stride = torch.empty([shape[dim] for dim in order]).permute(sorted(range(3), key=order.__getitem__)).stride()
        metas = [TensorMeta(shape, stride, F32), TensorMeta(shape, (800, 400, 1), F32)]
        for pair in (metas, metas[::-1]):
            wanted = aten.huber_loss(*(torch.empty_strided(*meta[:2]) for meta in pair), 0)
            found = with_real_strides(
                resolve(aten.huber_loss.default), [*pair, 0], {}, torch.empty(shape, device="meta")
            )
            assert found.stride() == wanted.stride()


def test_indices() -> None:
    draw = random.Random(0)
    calls = []
    for _ in range(600):
        table, *indices = _metas([draw.choice(PLACED[:-1]) for _ in range(3)], (F32, I64, I64))
        given = draw.choice(
            [indices[:1], [None, *indices[:1]], indices, [None, *indices], [indices[0], None, indices[1]]]
        )
        calls.append([table, given[: len(table.shape)]])
    assert not _wrong(aten.index.Tensor, [call for call in calls if any(call[1])])


def test_on_a_mesh() -> None:
    table, index = torch.arange(24.0).view(2, 3, 4), torch.tensor([[0, 1, 2], [2, 1, 0]])
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Replicate(), Shard(0), Shard(1)):
            x, i = distribute_tensor(table, mesh, [placement]), distribute_tensor(index, mesh, [Replicate()])
            found, wanted = x.mT[..., i.t()], table.mT[..., index.t()]
            assert found.stride() == wanted.stride()
            assert torch.equal(found.full_tensor(), wanted)


def test_gradient_of_a_redistributed_sum_stays_expanded() -> None:
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]).requires_grad_()
        (grad,) = torch.autograd.grad(x.redistribute(mesh, [Replicate()]).sum(), x)
        assert grad.stride() == (0, 0)
        assert torch.equal(grad.full_tensor(), torch.ones(1, 2))
