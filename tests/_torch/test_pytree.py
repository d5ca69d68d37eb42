"""Nested containers are taken apart and put together again."""

from __future__ import annotations

import torch

from shardwise._torch import pytree

NESTED = ((1, [torch.ones(2), None]), {"out": (2.0, "text")})


def test_flatten_and_unflatten() -> None:
    flat, tree = pytree.tree_flatten(NESTED)
    tensor = NESTED[0][1][0]
    assert [value for value in flat if value is not None and value is not tensor] == [1, 2.0, "text"]
    again = pytree.tree_unflatten(flat, tree)
    assert again[1] == NESTED[1]
    assert again[0][1][0] is tensor
    assert all(a is b for a, b in zip(pytree.tree_leaves(NESTED), flat, strict=True))


def test_maps() -> None:
    doubled = pytree.tree_map_only(int, lambda value: value * 2, NESTED)
    assert doubled[0][0] == 2
    assert doubled[1] == NESTED[1]
    assert pytree.tree_map(lambda value: value + 1, (1, [2])) == (2, [3])
    assert pytree.tree_leaves((1, (2, 3)), is_leaf=lambda value: value == (2, 3)) == [1, (2, 3)]
