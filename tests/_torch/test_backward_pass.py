"""What autograd says about the backward pass that runs, and the order in which it calls hooks."""

from typing import Any

import torch

from shardwise._torch.backward_pass import current_node, current_pass, materialized, metadata_of


def test_a_node_is_current_from_its_tensor_hooks_to_its_post_hooks() -> None:
    seen: list[tuple[str, Any]] = []
    x = torch.ones(2, requires_grad=True)
    y = x.cumprod(0)
    node = y.grad_fn
    assert node is not None
    node.register_prehook(lambda grads: seen.append(("prehook", current_node())))
    node.register_hook(lambda grad_inputs, grad_outputs: seen.append(("hook", current_node())))
    y.register_hook(lambda grad: seen.append(("tensor hook", current_node())))
    assert current_node() is None
    y.sum().backward()
    assert seen == [("tensor hook", node), ("prehook", node), ("hook", node)]


def test_metadata_lives_on_the_node() -> None:
    y = torch.ones(2, requires_grad=True) * 2
    assert y.grad_fn is not None
    metadata_of(y.grad_fn)["shardwise test"] = 1
    found: list[int] = []
    y.register_hook(lambda grad: found.append(metadata_of(current_node())["shardwise test"]))  # type: ignore[arg-type]
    y.sum().backward()
    assert found == [1]


def test_passes_have_numbers_of_their_own() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(current_pass()))
    assert current_pass() == -1
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert -1 not in seen
    assert len(set(seen)) == 2


def test_zeros_without_memory_are_materialized() -> None:
    zeros = torch._efficientzerotensor((2, 3))
    assert zeros._is_zerotensor()
    assert not materialized(zeros)._is_zerotensor()
    assert torch.equal(materialized(zeros), torch.zeros(2, 3))
    ones = torch.ones(2)
    assert materialized(ones) is ones
