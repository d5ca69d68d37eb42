"""Replace functions in the modules and classes that hold them, and restore them."""

from __future__ import annotations

from collections.abc import Callable

from .._torch.python_functions import Function, Place


class Replaced:
    """The original functions, by the places where they were replaced."""

    def __init__(self) -> None:
        self._originals: dict[Place, Function] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._originals

    def replace(self, places: list[Place], wrapped: Callable[[Function], Function]) -> None:
        """Put `wrapped(original)` at these places, one object for all of them. A second call does nothing."""
        wrappers: dict[Function, Function] = {}
        for place in places:
            if place not in self._originals:
                original = self._originals[place] = getattr(place.owner, place.name)
                if original not in wrappers:
                    wrappers[original] = wrapped(original)
                setattr(place.owner, place.name, wrappers[original])

    def restore(self) -> None:
        """Put the original functions back."""
        for place, original in self._originals.items():
            setattr(place.owner, place.name, original)
        self._originals.clear()
