"""The order of gathers, frees and reductions in a step, recorded as data that prints.

>>> print(fsdp.schedule(model))
forward    (root)    gather
forward    blocks.0  gather
forward    blocks.1  prefetch
forward    blocks.0  free
...
backward   blocks.0  reduce

The order in which modules run is taken from the last step: while a module computes, the next one is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .state import ModuleState


class Event(NamedTuple):
    """A gather, free or reduction of a group of parameters.

    >>> loss = fully_shard(model, mesh=mesh["dp"])(torch.ones(2, 4)).sum()
    >>> schedule(model).events[0]
    Event(phase='forward', group='(root)', action='gather')
    """

    phase: str
    """"forward" or "backward"."""
    group: str
    """The path of the module in the root."""
    action: str
    """"gather", "prefetch" (start a gather without waiting for it), "free" or "reduce"."""


class Schedule:
    """The events of a step, in order.

    >>> loss = fully_shard(model, mesh=mesh["dp"])(torch.ones(2, 4)).sum()
    >>> schedule(model).most_gathered()
    1
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, phase: str, group: str, action: str) -> None:
        """Record an event."""
        self.events.append(Event(phase, group, action))

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def most_gathered(self) -> int:
        """Return the largest number of groups whose parameters were gathered, or being gathered, at one time."""
        live: set[str] = set()
        most = 0
        for _, group, action in self.events:
            if action == "free":
                live.discard(group)
            elif action != "reduce":
                live.add(group)
            most = max(most, len(live))
        return most

    def __repr__(self) -> str:
        width = max((len(event.group) for event in self.events), default=0)
        return "\n".join(f"{phase:<8}  {group:<{width}}  {action}" for phase, group, action in self.events)


@dataclass
class Order:
    """The execution order of modules, in the root's last forward pass and in the present one so far."""

    last: list[ModuleState] = field(default_factory=list)
    now: list[ModuleState] = field(default_factory=list)
    finished: list[ModuleState] = field(default_factory=list)
    """The modules whose forward pass has ended and whose backward pass has not begun, in order."""

    def begin_forward(self) -> None:
        """Begin another forward pass of the root."""
        self.last, self.now = self.now, []

    def forward(self, state: ModuleState) -> ModuleState | None:
        """Record the forward pass of a module, and return the module that ran next in the last pass, if any.

        None if this pass has another order than the last one.
        """
        place = len(self.now)
        self.now.append(state)
        if place < len(self.last) and self.last[place] is state:
            return self.last[place + 1] if place + 1 < len(self.last) else None
        return None

    def backward(self, state: ModuleState) -> ModuleState | None:
        """Record the backward pass of a module, and return the module expected next."""
        for place in range(len(self.finished) - 1, -1, -1):
            if self.finished[place] is state:
                del self.finished[place:]
                return self.finished[-1] if self.finished else None
        return None
