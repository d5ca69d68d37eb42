"""Replay a recording."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

from torch import Tensor, fx

from .._torch import pytree
from .._torch.ops import packet_name
from ..dispatch.gather_cache import forget_gathered
from ..dispatch.writes import count_writes
from .callees import bindings_of
from .effects import Memory, is_op, is_wait, op_of, starts_collective, written_by
from .passes import PASSES
from .program import Program, axes_of
from .record import Recorded, Value
from .recorder import local_of
from .stages import OwnInputs, Run, Staged, captured, compiled

T = TypeVar("T")

_BACKENDS = {"cudagraph": captured, "inductor": compiled}


class Replay:
    """A recording that is ready to run. `text` is its program."""

    def __init__(self, recorded: Recorded, backend: str, passes: tuple[str, ...]) -> None:
        self.guards = recorded.guards
        self._recorded = recorded
        before = _counts(recorded.graph)
        self._changed = {name: run(recorded.graph) for name, run in PASSES.items() if name in passes}
        if "dead" in passes:
            self._changed["dead"] += PASSES["dead"](recorded.graph)
        self._counts = before, _counts(recorded.graph)
        recorded = self._recorded = _without_unread_state(recorded)
        self._written = _written_state(recorded)
        program = Program(recorded.graph, bindings_of(recorded.graph), _notes(recorded.graph))
        self.text = program.text
        self._run: Run = program.run if backend == "eager" else Staged(recorded.graph, _BACKENDS[backend])
        self._copies = backend == "cudagraph"  # the next replay overwrites its results
        if self._copies:
            self._run = _on_own_inputs(self._run, recorded)
        self._arguments = recorded.arguments
        self._live = list(recorded.live_grads.values())
        self._state = [tensor for node, tensor in recorded.state.items() if node not in recorded.live_grads]
        self._outputs, self._structure, self._grads = recorded.outputs, recorded.structure, recorded.grads
        self._dropped = recorded.dropped

    def __call__(self, leaves: list[object]) -> Any:
        """Replay the step with these arguments, and return its result."""
        for leaf in self._dropped:  # early, as the step does, so that memory is not held for longer
            leaf.grad = None
        given = [local_of(leaves[index]) for index in self._arguments]
        given += [local_of(leaf.grad) for leaf in self._live]
        values = iter(self._run(*given, *self._state))
        if self._copies:
            values = iter([value.clone() for value in values])
        outputs = [v.wrapped(next(values)) if isinstance(v, Value) else v for v in self._outputs]
        for leaf, grad in self._grads:
            leaf.grad = None if grad is None else grad.wrapped(next(values))
        forget_gathered()
        count_writes(self._written)
        return pytree.tree_unflatten(outputs, self._structure)

    def explain(self) -> str:
        """Return a summary: ops, collectives by axis with bytes, changes by passes, and guards."""
        before, after = self._counts
        lines = [f"{name}: {after[name]}, recorded {before[name]}" for name in before]
        lines += [
            f"  {name}: {count}, {size:,} B" for name, (count, size) in _collectives(self._recorded.graph).items()
        ]
        lines += [f"optimizer: {step.describe()}" for step in self._recorded.steps]
        lines.append("passes: " + ", ".join(f"{name} {count}" for name, count in self._changed.items()))
        return "\n".join([*lines, f"guards: {self.guards.describe()}"])


def _counts(graph: fx.Graph) -> dict[str, int]:
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return {
        "ops": sum(is_op(node) for node in nodes),
        "collectives": sum(map(starts_collective, nodes)),
        "waits": sum(map(is_wait, nodes)),
    }


def _collectives(graph: fx.Graph) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of the collectives of each kind and axis."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for node in graph.nodes:
        if starts_collective(node):
            name = f"{packet_name(op_of(node)).split('::')[1]} over {axes_of(node.args[-1])}"
            counts[name] += 1
            sizes[name] += _nbytes(node)
    return {name: (counts[name], sizes[name]) for name in counts}


def _nbytes(node: fx.Node) -> int:
    metas = node.meta["members"] if "members" in node.meta else [node.meta["tensor"]]
    return sum(meta.nbytes for meta in metas)


def _notes(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the comments on nodes: the axis of a collective, and its bytes."""
    return {
        node: f"over {axes_of(node.args[-1])}, {_nbytes(node):,} B" for node in graph.nodes if starts_collective(node)
    }


def _without_unread_state(recorded: Recorded) -> Recorded:
    """Return the recording without state that no op reads any more, and with gradients before other state."""
    for node in [node for node in recorded.state if not node.users]:
        recorded.graph.erase_node(node)
    state = {node: tensor for node, tensor in recorded.state.items() if node.users}
    live = {node: leaf for node, leaf in recorded.live_grads.items() if node.users}
    others = [node for node in state if node not in live]
    for node in live if others else ():
        others[0].prepend(node)
    return recorded._replace(state=state, live_grads=live)


def _on_own_inputs(run: Run, recorded: Recorded) -> OwnInputs:
    """Return a function that copies the arguments and the gradients of a recording, and not its other state."""
    count = len(recorded.arguments) + len(recorded.live_grads)
    placeholders = [node for node in recorded.graph.nodes if node.op == "placeholder"]
    written = _written_nodes(recorded.graph)
    return OwnInputs(run, count, [index for index, node in enumerate(placeholders[:count]) if node in written])


def _written_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose memory a graph writes."""
    memory = Memory(graph)
    return {root for node in graph.nodes for argument in written_by(node) for root in memory.roots(argument)}


def _written_state(recorded: Recorded) -> list[Tensor]:
    """Return the state that the recording writes."""
    written = _written_nodes(recorded.graph)
    stepped = [local_of(p) for step in recorded.steps for p in step.parameters]
    return [tensor for node, tensor in recorded.state.items() if node in written] + stepped
