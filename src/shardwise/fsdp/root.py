"""State shared by all `fully_shard` modules below one root: execution order, and reductions in flight."""

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
    """State shared by all modules below one root: execution order, and reductions in flight."""

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
        """Start a new schedule if the last step has ended."""
        if self.schedule.events and not self.order.finished:
            self.last_schedule, self.schedule = self.schedule, Schedule()

    def begin_backward(self) -> None:
        """Record that a backward pass has begun, and register `end_backward` to run at its end."""
        if not self.in_backward:
            self.in_backward = True
            call_after_backward(self.end_backward)

    def end_backward(self) -> None:
        """Reduce remaining gradients, free remaining parameters, and wait for all reductions."""
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
        """Let a reduction overlap the backward pass of the next module, and wait for those of earlier modules."""
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
