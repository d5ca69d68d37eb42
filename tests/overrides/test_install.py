"""Overrides are put in place by the first mesh, can be removed, and put in place again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Shard
from shardwise._torch.python_functions import functions_that_make_tensors
from shardwise.errors import MixedTensorError
from shardwise.ops.registry import registry
from shardwise.overrides.install import install_overrides, uninstall_overrides
from tests.ops.helpers import on, r, ranks, whole


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    install_overrides()
    yield
    install_overrides()


def functions() -> list[Any]:
    return [getattr(place.owner, place.name) for place in functions_that_make_tensors()]


def has_kernel(func: Any) -> bool:
    exists = torch._C._dispatch_has_kernel(func.name())  # some overloads are known to the script compiler only
    return exists and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "PythonTLSSnapshot")


def overridden() -> list[str]:
    facts = registry.overloads_with(lambda op: op.override or op.derivative_makes_tensors)
    return [str(func) for func, _ in facts if has_kernel(func)]


def test_plain_pytorch_is_as_before() -> None:
    wrappers, names = functions(), overridden()
    assert len(names) > 70
    uninstall_overrides()
    uninstall_overrides()  # nothing is left to remove
    assert [wrapper.__wrapped__ for wrapper in wrappers] == functions()
    assert overridden() == []
    x = r(5, 2, 4).requires_grad_()
    torch.manual_seed(0)
    module = nn.LSTM(4, 3)
    output, _ = module(x)
    output.cumprod(0).sum().backward()
    assert x.grad is not None
    assert F.linear(x, r(3, 4)).shape == (5, 2, 3)
    gradient, x.grad = x.grad, None
    install_overrides()
    module(x)[0].cumprod(0).sum().backward()
    torch.testing.assert_close(x.grad, gradient)


def test_they_are_installed_again() -> None:
    names = overridden()
    with ranks(2) as mesh:
        x = on(mesh, r(4), Shard(0))
        uninstall_overrides()
        with pytest.raises(MixedTensorError):
            torch.combinations(x)
    install_overrides()
    install_overrides()  # once is enough
    assert overridden() == names
    with ranks(2) as mesh:
        torch.testing.assert_close(whole(torch.combinations(on(mesh, r(4), Shard(0)))), torch.combinations(r(4)))
        x, w = on(mesh, r(4, 6), Shard(0), grad=True), on(mesh, r(3, 6), Shard(0))
        F.linear(x, w).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(whole(x.grad), torch.ones(4, 3) @ r(3, 6))
