"""A call of a Python function in a graph that `make_fx` records."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise._torch.proxies import call_in_graph


def doubled(x: Tensor) -> Tensor:
    return x.add(x)


def test_a_call_is_one_node() -> None:
    graph = make_fx(lambda x: call_in_graph(doubled, x * 3).relu())(torch.ones(2))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert doubled in targets
    assert torch.ops.aten.add.Tensor not in targets
    torch.testing.assert_close(graph(torch.full((2,), 5.0)), torch.full((2,), 30.0))


def test_a_tensor_that_the_graph_does_not_know() -> None:
    other = torch.ones(2)
    assert call_in_graph(doubled, other) is NotImplemented
    answers = []
    make_fx(lambda x: answers.append(call_in_graph(doubled, other)) or x)(torch.ones(2))
    assert answers == [NotImplemented]
