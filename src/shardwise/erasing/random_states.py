"""Generators that are set back while a step runs: activation checkpointing draws the same numbers twice.

Setting a generator's state is not an op. A recording notices it when, before a draw, a generator is not in the state in
which the last draw left it. If it was in that state earlier in the step, a node is added that saves the state there,
and one that restores it here. If not, recording fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from ..errors import EraseError
from ..sharding.source_lines import users_line
from ..world.generators import generator_for

if TYPE_CHECKING:
    from .recorder import OpRecorder


class RandomStates:
    """The states of the default generators before each draw of a recording."""

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() and torch.cuda.is_initialized() else [])]
        self._generators = [generator_for((), torch.device(device)) for device in devices]
        self._left = self._states()
        """The state of each generator after the last recorded draw."""
        self._found: list[list[tuple[bytes, fx.Node]]] = [[] for _ in devices]
        """For each generator, the states before its draws, each with the node that draws."""

    def before_draw(self) -> None:
        """Record that generators were set back since the last draw, if they were."""
        for which, state in enumerate(self._states()):
            if state != self._left[which]:
                self._set_back(which, state)

    def after_draw(self, node: fx.Node) -> None:
        """Record the states before and after a draw of the generators that it has changed."""
        for which, state in enumerate(self._states()):
            if state != self._left[which]:
                self._note(which, node, state)

    at_end = before_draw

    def _states(self) -> list[bytes]:
        with self._recorder.pause():
            return [generator.get_state().numpy().tobytes() for generator in self._generators]

    def _note(self, which: int, node: fx.Node, state: bytes) -> None:
        self._found[which].append((self._left[which], node))
        self._left[which] = state

    def _set_back(self, which: int, state: bytes) -> None:
        generator, graph = self._generators[which], self._recorder.graph
        node = next((node for found, node in self._found[which] if found == state), None)
        if node is None:
            raise EraseError(
                f"{users_line()}: the step seeds a generator, or sets it to a state from outside, which a replay would "
                "not do",
                "seed before the step, or draw from a generator of the step's own that is passed as generator=",
            )
        with graph.inserting_before(node):
            saved = graph.call_function(get_state, (generator,))  # type: ignore[arg-type]
        back = graph.call_function(set_state, (generator, saved))  # type: ignore[arg-type]
        self._note(which, back, state)


def get_state(generator: torch.Generator) -> Tensor:
    """Return the state of a generator."""
    return generator.get_state()


def set_state(generator: torch.Generator, state: Tensor) -> None:
    """Set a generator to a state."""
    generator.set_state(state)
