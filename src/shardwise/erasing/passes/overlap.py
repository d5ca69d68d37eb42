"""Overlap collectives with computation: starts move up, waits move down. Starts keep their order.

A start moves up at most to the wait before it, so that no more than two results are in memory before they are read.
Otherwise all gathers of parameters, whose inputs are ready from the beginning, would run at once.
"""

from __future__ import annotations

from torch import fx

from ..effects import Memory, is_barrier, is_wait, starts_collective


def overlap(graph: fx.Graph) -> int:
    """Start collectives where their inputs are ready, and wait where their results are read. Return how many moved."""
    memory = Memory(graph)  # stays valid: moving nodes does not change it
    moved = sum(_start_early(node, memory) for node in list(graph.nodes) if starts_collective(node))
    return moved + sum(_wait_late(node, memory) for node in reversed(list(graph.nodes)) if is_wait(node))


def _start_early(start: fx.Node, memory: Memory) -> int:
    """Move a start up to its inputs, the last write to them, or the collective or wait before it.

    Return 1 if it moved, else 0.
    """
    needed = set(start.all_input_nodes)
    for argument in start.all_input_nodes:
        for root in memory.roots(argument):
            needed.update(memory.writers.get(root, ()))
    place = start.prev
    while place.op == "call_function" and not (place in needed or _stops(place)):
        place = place.prev
    if place is start.prev:
        return 0
    place.append(start)
    return 1


def _stops(node: fx.Node) -> bool:
    return starts_collective(node) or is_wait(node) or is_barrier(node)


def _wait_late(wait: fx.Node, memory: Memory) -> int:
    """Move a wait down to the first node that reads its result, or writes what the collective reads or fills.

    Return 1 if it moved, else 0.
    """
    watched = set(memory.roots(wait))
    for root in list(watched):
        if starts_collective(root):
            for argument in root.all_input_nodes:
                watched |= memory.roots(argument)
    stops = set(wait.users)
    for root in watched:
        stops.update(memory.writers.get(root, ()))
    place = wait.next
    while place not in stops and place.op == "call_function" and not is_barrier(place):
        place = place.next
    if place is wait.next:
        return 0
    place.prepend(wait)
    return 1
