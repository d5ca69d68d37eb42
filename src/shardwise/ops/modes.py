"""The modes of this thread, as ops and dispatch read them; users switch them with `dispatch.modes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from .._torch.tls import ThreadValue

Explicit = Literal["off", "raise", "warn"]
"""What happens where an op needs communication."""


class Switches(NamedTuple):
    """Which modes are on."""

    explicit: Explicit = "off"
    implicit_replication: bool = False
    strict_ops: bool = False


current = ThreadValue("modes", Switches())


@contextmanager
def switched(**switches: Any) -> Iterator[None]:
    """Give these fields of `Switches` these values inside the block."""
    with current.changed_to(current.get()._replace(**switches)):
        yield


class Modes:
    """The modes of this thread. Backward passes have the modes of the thread that starts them, on any device."""

    @property
    def explicit(self) -> bool:
        """Whether an op that needs communication is an error, or at least a warning."""
        return current.get().explicit != "off"

    @property
    def explicit_warns(self) -> bool:
        """Whether an op that needs communication is a warning, not an error."""
        return current.get().explicit == "warn"

    @property
    def implicit_replication(self) -> bool:
        """Whether plain tensors are taken as replicated."""
        return current.get().implicit_replication

    @property
    def strict_ops(self) -> bool:
        """Whether an op without a rule is an error."""
        return current.get().strict_ops


modes = Modes()
