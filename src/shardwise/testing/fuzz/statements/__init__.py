"""The statements that random programs are made of, one file for each family."""

from . import elementwise, gradients, indexing, making, matrix, reductions, views, writes
from .table import TABLE, Entry

__all__ = [
    "TABLE",
    "Entry",
    "elementwise",
    "gradients",
    "indexing",
    "making",
    "matrix",
    "reductions",
    "views",
    "writes",
]
