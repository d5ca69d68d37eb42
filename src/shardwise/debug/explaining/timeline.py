"""When ops and collectives run, on each rank."""

from __future__ import annotations

from typing import Any


class Timeline:
    """Stub."""

    def computed(self, *args: Any) -> None:
        """Stub."""

    def communicated(self, *args: Any) -> None:
        """Stub."""
