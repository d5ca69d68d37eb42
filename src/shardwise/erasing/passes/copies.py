"""Remove copies of memory that is not read again, and copies of copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import SymInt, fx

from ...ops.recorded import COPIES
from ...world.rank_int import values_of
from ..effects import Memory, is_op, starts_collective
from ..recorder import Meta


def merge_copies(graph: fx.Graph) -> int:
    """Remove copies of memory that is not read later, and copies of copies. Return how many."""
    return _Copies(graph).run()


class _Copies:
    """The state of `merge_copies`."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.memory = graph, Memory(graph)
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.last_use = self.memory.last_uses(self.order)
        self.merged: dict[fx.Node, frozenset[fx.Node]] = {}
        """For each removed copy, the roots of the memory that its users read now."""

    def run(self) -> int:
        changed = 0
        for node in list(self.graph.nodes):
            if not is_op(node) or node.target not in COPIES or not isinstance(node.args[0], fx.Node):
                continue
            source = node.args[0]
            if self._ends_with(node, source):
                roots = self._roots(source)
                for root in roots:
                    self.last_use[root] = max(self.last_use[root], self.last_use.get(node, 0))
                self.merged[node] = roots
                node.replace_all_uses_with(source)
                self.graph.erase_node(node)
                changed += 1
            elif self._copies_a_copy(node, source):
                node.update_arg(0, source.args[0])
                changed += 1
        return changed

    def _roots(self, node: fx.Node) -> frozenset[fx.Node]:
        found = (self.merged.get(root, frozenset([root])) for root in self.memory.roots(node))
        return frozenset().union(*found)

    def _ends_with(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether the source has the copy's shape and strides, was made by an op, and is not read later."""
        one, other = node.meta.get("tensor"), source.meta.get("tensor")
        if one is None or one != other:
            return False
        return all(self._is_free(root, self.order[node], one) for root in self._roots(source))

    def _is_free(self, root: fx.Node, at: int, copy: Meta) -> bool:
        made = root.meta.get("tensor")
        if not is_op(root) or starts_collective(root) or made is None:
            return False
        same_size = _numels(made.shape) == _numels(copy.shape)  # else more memory is held for longer
        return same_size and self.last_use[root] <= at

    def _copies_a_copy(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether `node` is a row-major copy of a copy that has no other user, and could copy its source."""
        if source.target not in COPIES or list(source.users) != [node] or not node.kwargs.get("memory_format"):
            return False
        base = source.args[0]
        if not isinstance(base, fx.Node) or source in self.merged:
            return False
        between = range(self.order[source], self.order[node])
        roots = self._roots(base) | self.memory.roots(base) | {source}
        return not any(self.order[writer] in between for root in roots for writer in self.memory.writers.get(root, ()))


def _numels(shape: Sequence[int | SymInt]) -> object:
    """Return the number of elements; where simulated ranks have different numbers, that of each."""
    numel = math.prod(shape)
    return values_of(numel) or numel
