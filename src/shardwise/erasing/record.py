"""Record one call of a step, with everything needed to replay it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard, TypeVar

from torch import Tensor, fx

from .._torch import pytree
from ..dispatch.gather_cache import forget_gathered
from ..errors import EraseError
from ..sharding.base import DTensorBase
from ..sharding.spec import DTensorSpec
from ..world import shards_of
from .guards import Guards, watching_modules
from .optimizers import OptimizerStep, parameters_of, recording_optimizers, watching_zero_grad
from .program import parameter_names
from .recorder import OpRecorder, local_of, spec_of

T = TypeVar("T")


class Value(NamedTuple):
    """A tensor that a step returns or leaves as a gradient: its node, and its spec if it is distributed."""

    node: fx.Node
    spec: DTensorSpec | None

    def wrapped(self, local: Tensor) -> Tensor:
        """Return the tensor with this local shard."""
        return local if self.spec is None else DTensorBase.concrete.wrap(local, self.spec)


class Recorded(NamedTuple):
    """The recording of one call of a step."""

    graph: fx.Graph
    arguments: list[int]
    """The indices of the arguments' leaves that are tensors: the first placeholders."""
    live_grads: dict[fx.Node, Tensor]
    """The leaves whose gradients the step reads or adds to."""
    state: dict[fx.Node, Tensor]
    """The local shards and plain tensors that exist before the call, with the gradients that the step reads."""
    outputs: list[Value | object]
    structure: Any
    grads: list[tuple[Tensor, Value | None]]
    """The leaves whose gradients the step sets, with the new gradient (None: it has none after the step)."""
    dropped: list[Tensor]
    """The leaves whose old gradients the step drops, and which it then gives new ones or none."""
    guards: Guards
    steps: list[OptimizerStep]
    escaped: list[str]
    """The lines that made tensors that something outside the step has kept."""


def record(
    fn: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object], leaves: list[object]
) -> tuple[Recorded, T]:
    """Run a function and record it. Return the recording, and the function's result, detached."""
    recorder, guards = OpRecorder(), Guards()
    guards.add_callable(fn)
    step = _Step(recorder, guards, leaves)
    arguments = _bind_arguments(recorder, fn, leaves)
    forget_gathered()
    with step.watching(), recorder.recording():
        results = [fn(*args, **kwargs)]
        recorder.random.at_end()
    forget_gathered()
    guards.refuse_changes()
    return step.recorded(arguments, results)


def _bind_arguments(recorder: OpRecorder, fn: Callable[..., object], leaves: list[object]) -> list[int]:
    """Make placeholders for the tensors among the arguments, and return their indices."""
    names = parameter_names(fn)
    found = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for index, leaf in found.items():
        name = names[index] if index < len(names) else f"argument_{index}"
        recorder.input(local_of(leaf), name)
    return list(found)


class _Step:
    """A step while it is recorded: the gradients of its leaves, and its optimizers."""

    def __init__(self, recorder: OpRecorder, guards: Guards, leaves: list[object]) -> None:
        self.recorder, self.guards, self.leaves = recorder, guards, leaves
        self.optimizer_steps: list[OptimizerStep] = []
        known = [*guards.tensors(), *(p for optimizer in guards.optimizers for p in parameters_of(optimizer)), *leaves]
        self.before = {id(t): (t, t.grad) for t in known if _is_leaf(t)}
        """By id: the leaves that are known before the call, and their gradients."""
        self.dropped: set[int] = set()
        """The ids of the leaves whose earlier gradients `zero_grad` drops."""
        self.grads: list[tuple[Tensor, Value | None]] = []
        self.live: dict[fx.Node, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record modules, optimizers and dropped gradients inside the block."""
        with (
            watching_modules(self.recorder, self.guards),
            watching_zero_grad(self.before, self.dropped),
            recording_optimizers(self.recorder, self.optimizer_steps),
        ):
            yield

    def recorded(self, arguments: list[int], results: list[T]) -> tuple[Recorded, T]:
        """Return the recording, and the result of the step, the only element of `results`, which is removed."""
        recorder, guards = self.recorder, self.guards
        flat, structure = pytree.tree_flatten(results.pop())  # no other reference, so its graph of autograd is freed
        outputs = [_output(recorder, value) for value in flat]
        kept = [local_of(value).detach() if isinstance(value, Tensor) else value for value in flat]
        del flat
        for leaf in self._leaves():
            self._note_gradient(leaf)
        new_grads = [local_of(leaf.grad) for leaf, value in self.grads if value is not None]
        escaped = _escaped(recorder, [*kept, *new_grads])
        self._guard_state()
        guards.add_steps(self.optimizer_steps)
        values = [v for v in (*outputs, *(value for _, value in self.grads)) if isinstance(v, Value)]
        recorder.graph.output(tuple(value.node for value in values))
        made = [v.wrapped(local) if isinstance(v, Value) else v for v, local in zip(outputs, kept, strict=True)]
        return Recorded(
            recorder.graph,
            arguments,
            self.live,
            recorder.state,
            outputs,
            structure,
            self.grads,
            [leaf for leaf, _ in self.grads if id(leaf) in self.dropped],
            guards,
            self.optimizer_steps,
            escaped,
        ), pytree.tree_unflatten(made, structure)

    def _leaves(self) -> list[Tensor]:
        """Return the leaves whose gradients the step may have changed."""
        owners = [tensor for tensor in self.recorder.owners.values() if tensor is not None]
        stepped = [parameter for step in self.optimizer_steps for parameter in step.parameters]
        candidates = [*owners, *stepped, *self.guards.tensors(), *(leaf for leaf, _ in self.before.values())]
        return list({id(tensor): tensor for tensor in candidates if _is_leaf(tensor)}.values())

    def _note_gradient(self, leaf: Tensor) -> None:
        """Record what a replay must do with the gradient of one leaf."""
        recorder, last = self.recorder, leaf.grad
        first = self.before[id(leaf)][1] if id(leaf) in self.before else recorder.first_grads.get(id(leaf))
        state = {id(tensor): node for node, tensor in recorder.state.items()}
        read = state.get(id(local_of(first))) if first is not None else None
        if read is None and last is not None and id(local_of(last)) in state:
            first, read = last, state[id(local_of(last))]
        if read is not None:  # the gradient was added to, or set to zero in place
            self.live[read] = leaf
            self.guards.add_grad(leaf, first)
        elif last is not None and (node := recorder.known(local_of(last))) is not None:
            if id(leaf) not in self.dropped:
                self.guards.add_grad(leaf, None)
            self.grads.append((leaf, Value(node, spec_of(last))))
            return
        if last is None and (first is not None or id(leaf) in self.dropped):
            self.grads.append((leaf, None))

    def _guard_state(self) -> None:
        """Guard the state's memory, and name its nodes."""
        for node, tensor in self.recorder.state.items():
            owner = self.recorder.owners.get(tensor)
            if node in self.live:
                _rename(node, f"grad_of_{self.guards.names.get(id(self.live[node]), 'leaf')}")
                continue
            if owner is not None:
                self.guards.add_tensor(owner, tensor)
            _rename(node, self.guards.names.get(id(owner if owner is not None else tensor)))


def _output(recorder: OpRecorder, value: object) -> Value | object:
    if isinstance(value, Tensor):
        return Value(recorder.node_of(local_of(value)), spec_of(value))
    if isinstance(value, (bool, int, float, complex)):
        raise EraseError(
            f"the step returns the number {value!r}, which every replay would repeat",
            "return a tensor, and read the number from it after the step: step(batch).item()",
        )
    return value


def _escaped(recorder: OpRecorder, kept: list[object]) -> list[str]:
    """Return the lines that made tensors which outlive the step, but are neither returned nor a .grad."""
    known = [*(tensor for tensor in kept if isinstance(tensor, Tensor)), *recorder.state.values()]
    storages = {storage for tensor in known for storage in _storages(tensor)}

    def alive() -> list[str]:
        return [
            f"{node.meta['line']} ({node.name})"
            for tensor, node in recorder.made()
            if "line" in node.meta and not storages.issuperset(_storages(tensor))
        ]

    if alive():
        gc.collect()  # tensors that only a cycle of garbage refers to are not kept
    return list(dict.fromkeys(alive()))


def _storages(tensor: Tensor) -> list[int]:
    return [shard.untyped_storage().data_ptr() for shard in shards_of(tensor)]


def _rename(node: fx.Node, name: str | None) -> None:
    if name and name.isidentifier():
        node._rename(name)


def _is_leaf(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf
