"""Temporary: names that other families still import from here."""

from .reduce import over as over
from .reduce import wide as wide
from .variance import moments as moments
