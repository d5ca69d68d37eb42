"""Reads, writes and shared memory of the nodes of a recording, for passes that move or remove nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .._torch.collectives import WAIT
from .._torch.ops import OpOverload, schema_of
from ..ops.recorded import SHARES_MEMORY, STARTS

Roots = frozenset[fx.Node]


def is_op(node: fx.Node) -> bool:
    """Return whether a node is an op, rather than a plain function."""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def op_of(node: fx.Node) -> OpOverload:
    """Return the op that a node calls."""
    assert isinstance(node.target, OpOverload)
    return node.target


def starts_collective(node: fx.Node) -> bool:
    """Return whether a node starts a collective, whose result is ready after a wait."""
    return node.op == "call_function" and node.target in STARTS


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a collective."""
    return node.target is WAIT


def is_barrier(node: fx.Node) -> bool:
    """Return whether a node is a function that may read and write anything, e.g. an optimizer step."""
    return node.op == "call_function" and not is_op(node) and not {"pure", "local"} & node.meta.keys()


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node may write: for a function that is not an op, all of them."""
    if not is_op(node):
        return [] if "pure" in node.meta else list(node.all_input_nodes)
    written: list[fx.Node] = []
    for argument, value in _arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _nodes_in(value)
    return written


def has_effects(node: fx.Node) -> bool:
    """Return whether a node does more than return a result that depends only on its arguments."""
    if node.op != "call_function":
        return True
    if not is_op(node):
        return "pure" not in node.meta
    tags = node.target.tags  # type: ignore[union-attr]
    return (
        bool(written_by(node)) or starts_collective(node) or is_wait(node) or torch.Tag.nondeterministic_seeded in tags
    )


class Memory:
    """Which nodes share memory: the roots of a node are the nodes that allocated the memory of its value."""

    def __init__(self, graph: fx.Graph) -> None:
        self._roots: dict[fx.Node, Roots] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        """The nodes that write to the memory of each root, in order."""
        for node in graph.nodes:
            self._roots[node] = self._roots_of(node)
            for written in written_by(node):
                for root in self.roots(written):
                    self.writers.setdefault(root, []).append(node)

    def last_uses(self, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """Return for each root the position of the last node that reads its memory. That of inputs is the end."""
        last: dict[fx.Node, int] = {}
        for node, roots in self._roots.items():
            end = len(order) if node.op == "placeholder" else max((order[user] for user in node.users), default=0)
            for root in roots:
                last[root] = max(last.get(root, 0), end)
        return last

    def roots(self, node: fx.Node) -> Roots:
        """Return the nodes that allocated the memory of a node's value."""
        return self._roots.get(node, frozenset([node]))

    def _roots_of(self, node: fx.Node) -> Roots:
        shared = list(self._shared(node)) if node.op == "call_function" else []
        return frozenset().union(*map(self.roots, shared)) if shared else frozenset([node])

    def _shared(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return the arguments whose memory the result of a node may share."""
        if not is_op(node):
            return node.all_input_nodes if node.meta.get("pure") else ()
        if node.target in SHARES_MEMORY:
            return _nodes_in(node.args[0])
        return [n for argument, value in _arguments(node) if argument.alias_info is not None for n in _nodes_in(value)]


def _arguments(node: fx.Node) -> Iterable[tuple[Any, object]]:
    schema = schema_of(op_of(node))
    for argument, value in zip(schema.arguments, node.args, strict=False):
        yield argument, value
    named = {argument.name: argument for argument in schema.arguments}
    for name, value in node.kwargs.items():
        yield named[name], value


def _nodes_in(value: object) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [node for element in value for node in _nodes_in(element)] if isinstance(value, (list, tuple)) else []
