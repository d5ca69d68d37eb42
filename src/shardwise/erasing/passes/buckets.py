"""Join small all-reduces of one group, e.g. of the gradients of replicated parameters, which arrive one by one."""

from __future__ import annotations

import operator

from torch import fx

from ..._torch.collectives import all_reduce, all_reduce_coalesced
from ...tensor.gradient_buckets import DEFAULT_SIZE
from ..effects import Memory, is_barrier

BUCKET_BYTES = DEFAULT_SIZE
"""The largest size of a joined all-reduce in bytes. A larger tensor is reduced alone."""


def join_reductions(graph: fx.Graph) -> int:
    """Join all-reduces of one group and reduction op that come before the first use of a result. Return how many."""
    joined = 0
    memory = Memory(graph)
    open_buckets: dict[object, list[fx.Node]] = {}

    def close(key: object) -> int:
        bucket = open_buckets.pop(key)
        if len(bucket) > 1:
            _join(graph, bucket)
        return len(bucket) if len(bucket) > 1 else 0

    for node in list(graph.nodes):
        stopped = (
            set(open_buckets) if is_barrier(node) or node.op == "output" else _stopped_by(node, open_buckets, memory)
        )
        joined += sum(close(key) for key in sorted(stopped, key=repr))
        if node.target is all_reduce and "tensor" in node.meta:
            tensor = node.meta["tensor"]
            key = (node.args[1], node.args[2], tensor.dtype, tensor.device)
            size = tensor.nbytes + sum(member.meta["tensor"].nbytes for member in open_buckets.get(key, ()))
            if size > BUCKET_BYTES and key in open_buckets:
                joined += close(key)
            open_buckets.setdefault(key, []).append(node)
    return joined


def _stopped_by(node: fx.Node, buckets: dict[object, list[fx.Node]], memory: Memory) -> set[object]:
    """Return the buckets that must be sent before a node, which uses a result or writes an input of theirs."""
    found = set()
    for key, members in buckets.items():
        for member in members:
            writes = any(node in memory.writers.get(root, ()) for root in memory.roots(member.args[0]))  # type: ignore[arg-type]
            if writes or member in node.all_input_nodes:
                found.add(key)
    return found


def _join(graph: fx.Graph, bucket: list[fx.Node]) -> None:
    """Replace all-reduces by one at the place of the last of them."""
    last = bucket[-1]
    with graph.inserting_before(last):
        start = graph.call_function(all_reduce_coalesced, ([member.args[0] for member in bucket], *last.args[1:]))
        start.meta.update(line=last.meta.get("line"), members=[member.meta["tensor"] for member in bucket])
        for index, member in enumerate(bucket):
            piece = graph.call_function(operator.getitem, (start, index))
            piece.meta.update(tensor=member.meta["tensor"], pure=True)
            member.replace_all_uses_with(piece)
    for member in bucket:
        graph.erase_node(member)
