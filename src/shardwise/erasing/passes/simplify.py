"""Passes that remove ops: dead code, common subexpressions, views that change nothing."""

from __future__ import annotations

import torch
from torch import fx

from ...ops.recorded import CHANGES_SHAPE, MAY_CHANGE_NOTHING, OTHER_NAMES, RESHAPES, UNDONE_BY_THEMSELVES
from ..effects import Memory, has_effects, is_op, written_by


def remove_dead(graph: fx.Graph) -> int:
    """Remove ops whose results are not read. Return how many."""
    removed = 0
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not has_effects(node):
            graph.erase_node(node)
            removed += 1
    return removed


def remove_duplicates(graph: fx.Graph) -> int:
    """Replace ops by earlier ones with the same arguments, if these were not written since. Return how many.

    Only if the earlier result is still needed anyway: holding it for longer would cost memory.
    """
    memory, removed = Memory(graph), 0
    order = {node: index for index, node in enumerate(graph.nodes)}
    last_use = memory.last_uses(order)
    versions: dict[fx.Node, int] = {}
    found: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if is_op(node) and not has_effects(node) and not _is_written(node, memory):
            key = _key(node, memory, versions)
            earlier = found.setdefault(key, node) if key is not None else node
            if earlier is not node and all(last_use[root] >= order[node] for root in memory.roots(earlier)):
                for root in memory.roots(earlier):
                    last_use[root] = max(last_use[root], *(last_use[own] for own in memory.roots(node)))
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)
                removed += 1
                continue
            if earlier is not node:
                found[key] = node
        for written in written_by(node):
            for root in memory.roots(written):
                versions[root] = versions.get(root, 0) + 1
    return removed


def simplify_views(graph: fx.Graph) -> int:
    """Remove views that change nothing, and merge reshapes of reshapes. Return how many views changed."""
    if any(node.target in CHANGES_SHAPE for node in graph.nodes):
        return 0  # an alias may then have another shape than its source
    changed = 0
    for node in list(graph.nodes):
        if not is_op(node) or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if node.target in OTHER_NAMES or _is_same(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            changed += 1
        elif node.target in RESHAPES and source.target in RESHAPES and _can_view(source.args[0], node):
            node.update_arg(0, source.args[0])
            changed += 1
        elif node.target in UNDONE_BY_THEMSELVES and source.target is node.target:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
            changed += 1
    return changed


def _is_same(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a view has the shape and strides of its source."""
    if node.target not in MAY_CHANGE_NOTHING:
        return False
    one, other = node.meta.get("tensor"), source.meta.get("tensor")
    return one is not None and other is not None and one == other


def _can_view(base: object, node: fx.Node) -> bool:
    """Return whether the base is contiguous, so that it can be viewed in any shape of its size."""
    meta = base.meta.get("tensor") if isinstance(base, fx.Node) else None
    if meta is None or not all(isinstance(size, int) for size in (*meta.shape, *meta.stride)):
        return False
    expected = 1
    for size, stride in reversed(list(zip(meta.shape, meta.stride, strict=True))):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return node.meta.get("tensor") is not None


def _is_written(node: fx.Node, memory: Memory) -> bool:
    return any(root in memory.writers for root in memory.roots(node)) and node in memory.roots(node)


def _key(node: fx.Node, memory: Memory, versions: dict[fx.Node, int]) -> object:
    """Return what the result of an op depends on; None if that cannot be compared."""
    state = [
        sorted((root.name, versions.get(root, 0)) for root in memory.roots(argument))
        for argument in node.all_input_nodes
    ]
    try:
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())), repr(state))
        hash(key)
    except TypeError:
        return None
    return None if _holds_objects((node.args, node.kwargs)) else key


def _holds_objects(value: object) -> bool:
    """Return whether an argument contains an object that its `repr` does not identify."""
    if isinstance(value, dict):
        return any(map(_holds_objects, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_objects, value))
    plain = (fx.Node, bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return value is not None and not isinstance(value, plain)
