"""Guards written out as one function."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from shardwise.erasing.quick_check import quick_check


def test_each_kind_of_guard() -> None:
    options: dict[Any, Any] = {"training": True, "size": 4, 3: "text"}
    weight = torch.ones(2)
    tensors: dict[Any, Any] = {"weight": weight}
    owner = types.SimpleNamespace(spec="spec")
    check = quick_check(
        [(options, key, options[key]) for key in ("training", "size", 3)],
        [(tensors, "weight", weight)],
        [(owner, "spec", owner.spec)],
    )
    assert check()
    for where, key, other in (
        (options, "size", 5),
        (options, "training", False),
        (options, 3, ""),
        (tensors, "weight", 1),
    ):
        before, where[key] = where[key], other
        assert not check()
        where[key] = before
        assert check()
    owner.spec = "another"
    assert not check()
    owner.spec = "spec"
    del options["size"]
    with pytest.raises(KeyError):
        check()


def test_an_equal_tensor_is_another_one() -> None:
    tensors = {"weight": torch.ones(())}
    check = quick_check([], [(tensors, "weight", tensors["weight"])], [])
    tensors["weight"] = torch.ones(())
    assert not check()


def test_nothing_to_check() -> None:
    assert quick_check([], [], [])()
