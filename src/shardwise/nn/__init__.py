"""distribute_module: modules with distributed parameters."""

from .distribute import distribute_module

__all__ = ["distribute_module"]
