"""Classes that derive from DTensor."""

from __future__ import annotations

from typing import Any

import torch

import shardwise
from shardwise import DTensor, Shard, distribute_tensor, init_device_mesh


def test_a_subclass_dispatches_its_ops_and_passes_them_on() -> None:
    seen: list[object] = []

    class Logged(DTensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
            seen.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    class Plain(DTensor):
        pass

    with shardwise.simulate(2):
        x = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        for kind in (Logged, Plain):
            made = kind(x._local_tensor, x._spec, requires_grad=True)
            assert type(made) is kind
            for _ in range(2):  # planned, and known
                result = (made * 2 + made).sin()
                assert torch.equal(result.full_tensor().shards[1], (torch.arange(6.0) * 3).sin())
                assert result.placements == (Shard(0),)
            result.sum().backward()
            assert made.grad is not None
            assert torch.allclose(made.grad.full_tensor().shards[0], 3 * (torch.arange(6.0) * 3).cos())
        assert torch.ops.aten.mul.Tensor in seen
        assert torch.ops.aten.sin.default not in seen  # the result of an op is a DTensor
