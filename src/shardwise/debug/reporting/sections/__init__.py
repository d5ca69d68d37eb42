"""The sections of the page, one file for each."""

from .communication import communication
from .explanations import explanations
from .overview import overview
from .parameters import parameters
from .placements import placements
from .timeline import timeline

__all__ = ["communication", "explanations", "overview", "parameters", "placements", "timeline"]
