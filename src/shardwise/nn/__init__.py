"""Modules whose parameters are distributed."""

from .distribute import distribute_module

__all__ = ["distribute_module"]
