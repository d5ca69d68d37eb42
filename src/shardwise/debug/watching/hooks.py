"""The sources of events: ops on distributed tensors, `from_local`, collectives, random numbers.

The hooks are installed only while a watch runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..._torch.watching import Before, functional_collectives, wrap_op
from ...dispatch.arguments import Args, Kwargs
from ...dispatch.observe import LOOKUPS
from ...random.draw import DRAWS
from ...sharding.mesh import MeshInfo
from ...tensor.from_local import LOCAL_TENSORS
from ...world import current_world
from .collective_events import COLLECTIVES, CollectiveEvents
from .journal import Failing, Journal, digest
from .op_events import OpEvents, forget_calls, is_compared
from .stream import Stream

_frame = sys._getframe


class Hooks:
    """Writes what this rank does into a journal, from `install` to `remove`."""

    def __init__(self, journal: Journal, ops: bool = True) -> None:
        self.journal, self.ops, self.failing = journal, ops, Failing()
        self._op_events = OpEvents(journal, self.failing)
        self._before_end: Callable[[], None] = lambda: None
        self._on, self._changing = False, threading.Lock()
        self._undo: list[Callable[[], object]] = []
        self._undo_ops: list[Callable[[], object]] = []

    def observe_ops(self) -> None:
        """Record ops, if the watch includes them."""
        if self.ops:
            self._undo_ops.append(LOOKUPS.add(self._op_events.watched_lookup))
            self._undo_ops.append(LOCAL_TENSORS.add(self._op_events.local_tensor))

    def ignore_ops(self) -> None:
        """Stop recording ops. Collectives are still recorded."""
        while self._undo_ops:
            self._undo_ops.pop()()

    def install(self, before_end: Callable[[], None], meet: Callable[[Stream], None]) -> None:
        """Start to record. `before_end` is called before the program destroys its process groups.

        `meet` is called before a collective that is new (see `CollectiveEvents`).
        """
        self._before_end, self._on = before_end, True
        forget_calls()
        self.observe_ops()
        self._undo.append(DRAWS.add(self._draw))
        collectives = CollectiveEvents(self.journal, self.failing, meet)
        for op in functional_collectives():
            self._undo.append(wrap_op(op, collectives.before_functional(str(op))))
        for name in COLLECTIVES:
            original = getattr(dist, name, None)
            if original is not None:
                self._replace(name, original, collectives.before_call(name, original))
        self._replace("new_group", dist.new_group, self._new_group)
        self._replace("destroy_process_group", dist.destroy_process_group, self._destroy)
        self._undo.append(forget_calls)
        self._destroyed = collectives.forget_groups

    def remove(self) -> None:
        """Stop recording. Modules imported meanwhile may still hold our wrappers, which now only call the originals."""
        with self._changing:
            self._on, self.failing.failure = False, None
            self.ignore_ops()
        while self._undo:
            self._undo.pop()()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Raise this error at every event from now on."""
        with self._changing:
            if self._on:
                self.failing.failure = failure
                if self.ops:
                    self._undo_ops.append(LOOKUPS.add(lambda look_up: self._refuse))

    def _refuse(self, key: object) -> None:
        self.failing.check()

    def _replace(self, name: str, original: Callable[..., object], before: Before) -> None:
        """Replace a function of `torch.distributed` by one that calls `before` first."""

        def watched(*args: object, **kwargs: object) -> object:
            if self._on and current_world() is None:
                before(args, kwargs)
            return original(*args, **kwargs)

        watched.__name__, watched.__wrapped__ = name, original  # type: ignore[attr-defined]
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, watched)

        def undo() -> None:
            for module in (dist, dist.distributed_c10d):
                if getattr(module, name) is watched:
                    setattr(module, name, original)

        self._undo.append(undo)

    def _new_group(self, args: Args, kwargs: Kwargs) -> None:
        self.failing.check()
        if kwargs.get("use_local_synchronization"):
            return
        ranks = args[0] if args else kwargs.get("ranks")
        what = f"dist.new_group({'' if ranks is None else list(ranks)})"
        self.journal.stream(tuple(range(dist.get_world_size()))).append(
            self.journal.place(digest(what), what, _frame(2))
        )

    def _destroy(self, args: Args, kwargs: Kwargs) -> None:
        group = args[0] if args else kwargs.get("group")
        self._destroyed()
        if (group is None or group is dist.group.WORLD) and self.failing.failure is None:
            self._before_end()

    def _draw(self, mesh_info: MeshInfo, generator: torch.Generator) -> None:
        """Record the state of the generator before numbers are drawn for a distributed tensor."""
        self.failing.check()
        if not is_compared(mesh_info):
            return
        state = digest(generator_state(generator).hex())
        what = f"draw random numbers on {mesh_info!r}, the generator in state {state:x}"
        event = self.journal.place(state, what, _frame(1))
        self.journal.stream(mesh_info.ranks).append(event)


def generator_state(generator: torch.Generator) -> bytes:
    """Return the part of a generator's state that draws change: seed and offset; on a CPU the first 96 bytes."""
    if generator.device.type == "cpu":
        return generator.get_state().numpy()[:96].tobytes()
    return f"{generator.initial_seed()} {generator.get_offset()}".encode()
