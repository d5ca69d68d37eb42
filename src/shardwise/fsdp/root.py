"""What all modules of `fully_shard` below one root share: the order in which they run, and reductions under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._torch.autograd import call_after_backward
from ..sharding.mesh import MeshInfo
from .reduce import Reduction
from .schedule import Order, Schedule

if TYPE_CHECKING:
    from .state import ModuleState


class Root:
    """What all modules below one root share: the order in which they run, and reductions under way."""

    def __init__(self, state: ModuleState, states: Sequence[ModuleState]) -> None:
        self.state = state
        self.states = list(states)
        self.order = Order()
        self.schedule = Schedule()
        self.last_schedule = Schedule()
        self.inputs: MeshInfo | None = None
        self.reductions: list[Reduction] = []
        self.in_backward = False
        self.is_last_backward = True

    def begin_step(self) -> None:
        """Begin another schedule, if a step has ended."""
        if self.schedule.events and not self.order.finished:
            self.last_schedule, self.schedule = self.schedule, Schedule()

    def begin_backward(self) -> None:
        """Note that a backward pass has begun; what is left is done at its end."""
        if not self.in_backward:
            self.in_backward = True
            call_after_backward(self.end_backward)

    def end_backward(self) -> None:
        """Reduce and free what is left, and give the sharded parameters their gradients."""
        self.in_backward = False
        for state in self.states:
            if state.phase == "backward" or state.group.has_gradients():
                state.post_backward()
            state.phase = "idle"
        if self.is_last_backward:
            self.finish_reductions()
            self.order.finished.clear()
            for state in self.states:
                if state.group.is_under_way():
                    state.free("backward")

    def add_reduction(self, reduction: Reduction) -> None:
        """Let a reduction run beside the backward pass of the next module, and end those of earlier modules."""
        self._advance_reductions()
        self.reductions.append(reduction)

    def finish_reductions(self) -> None:
        """Wait for all reductions."""
        while self.reductions:
            self._advance_reductions()

    def _advance_reductions(self) -> None:
        for reduction in self.reductions:
            reduction.advance()
        self.reductions = [reduction for reduction in self.reductions if not reduction.finished]
