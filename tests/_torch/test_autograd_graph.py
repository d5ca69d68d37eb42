"""What shardwise relies on about nodes of the autograd graph."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._torch.autograd_graph import (
    accumulated_leaf,
    in_backward_pass,
    next_node_number,
    node_number,
)
from shardwise._torch.backward_pass import current_node


def test_numbers_count_up_as_nodes_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    first = next_node_number()
    y = x * 2
    second = next_node_number()
    z = y + 1
    assert first <= node_number(y.grad_fn) < second <= node_number(z.grad_fn) < next_node_number()


def test_the_node_of_an_op_is_made_before_the_op_runs_and_that_of_a_write_to_a_view_afterwards() -> None:
    numbers = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            numbers.append(next_node_number())
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Noting():
        y = x * 2
        assert node_number(y.grad_fn) == numbers[-1] - 1
        y.mul_(3)
        assert node_number(y.grad_fn) == numbers[-1] - 1
        z = x * 2
        view = z[0]
        view.mul_(2)
        assert node_number(z.grad_fn) in numbers[-3:]  # before PyTorch makes the view again
        assert type(z.grad_fn).__name__ == "CopySlices"


def test_the_running_node_is_known_in_a_backward_pass_alone() -> None:
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((in_backward_pass(), current_node()))
            return grad

    assert not in_backward_pass()
    assert current_node() is None
    y = Probe.apply(torch.ones(2, requires_grad=True))
    number = node_number(y.grad_fn)
    y.sum().backward()
    ((running, node),) = seen
    assert running
    assert node_number(node) == number
    assert not in_backward_pass()


def test_the_node_of_a_leaf_has_the_leaf() -> None:
    x = torch.ones(2, requires_grad=True)
    node = (x * 2).grad_fn
    assert accumulated_leaf(node) is None
    assert accumulated_leaf(node.next_functions[0][0]) is x
