"""Copies of what is not read again are not made; all others are."""

from __future__ import annotations

import re

import pytest
import torch

import shardwise
from shardwise import Shard
from tests.worlds import mesh_of


def copied_again(x):
    return (x * 2).clone().clone()


def turned(x):
    return (x * 2).clone().t().contiguous().clone()


def read_later(x):
    y = x * 2
    return y.clone() + y


def written_later(x):
    y = x * 2
    z = y.clone()
    y.add_(1)
    return z, y


def copy_is_written(x):
    y = (x * 2).clone()
    y.add_(1)
    return y


def written_between(x):
    y = x * 2
    first = y.clone()
    y.add_(1)
    return first.t().clone(memory_format=torch.contiguous_format), y


def of_an_argument(x):
    y = x.clone()
    return y.mul_(2), x.clone()


def a_small_part(x):
    return (x * 2)[:1].clone()


def both_returned(x):
    y = x * 2
    return y, y.clone()


CASES = {
    copied_again: 2,
    turned: 2,
    read_later: 0,
    written_later: 0,
    copy_is_written: 1,
    written_between: 0,
    of_an_argument: 0,
    a_small_part: 0,
    both_returned: 0,
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_copies(function):
    with mesh_of(2) as mesh, torch.no_grad():
        tensors = [shardwise.distribute_tensor(torch.randn(8, 4), mesh, [Shard(1)]) for _ in range(3)]
        step = shardwise.erase(function)
        for x in tensors:
            before = x.full_tensor().clone()
            found, expected = step(x), function(x)
            for one, other in zip(*(v if isinstance(v, tuple) else (v,) for v in (found, expected)), strict=True):
                torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=0, atol=0)
                assert one.stride() == other.stride()
            torch.testing.assert_close(x.full_tensor(), before, rtol=0, atol=0)
        assert step.recordings == 1
        assert int(re.search(r"copies (\d+)", step.explain())[1]) == CASES[function]
