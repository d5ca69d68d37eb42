"""Modules made from the table, when a program imports them.

>>> from shardwise._dtensor_spec import DTensorSpec
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ..errors import InputError
from .table import MODULES, NO_COUNTERPART, names_of

PACKAGE = __name__.partition(".")[0]


class _NoCounterpart(type):
    """The type of names of PyTorch's implementation without a counterpart: isinstance is False, other uses raise."""

    def _refuse(cls, *args: object, **kwargs: object) -> object:
        raise InputError(
            f"{cls.__module__}.{cls.__name__} is part of the implementation of PyTorch's DTensor, "
            "without a counterpart in shardwise",
            "use a public name: register_sharding, x.redistribute(), x.placements",
        )

    __call__ = __getitem__ = __iter__ = __len__ = __contains__ = _refuse

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._refuse()


class TableModule(ModuleType):
    """A module whose names are looked up in the table on first use, so that importing it imports nothing else."""

    _homes: dict[str, str]

    def __getattr__(self, name: str) -> object:
        homes: dict[str, str] = self.__dict__["_homes"]
        if name not in homes:
            raise AttributeError(
                f"{self.__name__} has no {name!r}: it is a private name of PyTorch's DTensor without a counterpart "
                f"in shardwise. It has {', '.join(homes) or 'none'}."
            )
        value: object
        if homes[name] == NO_COUNTERPART:
            value = _NoCounterpart(name, (), {"__module__": self.__name__})
        else:
            value = getattr(importlib.import_module(f"{PACKAGE}.{homes[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


class _TableLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = TableModule(spec.name, f"The names of `torch.distributed.{_relative(spec.name)}`.")
        module._homes = names_of(_relative(spec.name))
        module.__dict__["__all__"] = [name for name in module._homes if not name.startswith("_")]
        module.__dict__["__path__"] = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a table module has no code."""


class _TableFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{PACKAGE}.") and _relative(fullname) in MODULES:
            return ModuleSpec(fullname, _TableLoader(), is_package=True)
        return None


def _relative(fullname: str) -> str:
    return fullname.partition(".")[2]


_finder = _TableFinder()


def find_table_modules() -> None:
    """Let `import shardwise._api` and the like find the modules of the table, after those that are files.

    >>> find_table_modules()
    >>> from shardwise._dtensor_spec import DTensorSpec       # a module of the table
    """
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def table_module(name: str) -> ModuleType:
    """Return the module `shardwise.<name>` of the table; raise an AttributeError if there is none.

    >>> table_module("_dtensor_spec").DTensorSpec is shardwise.DTensorSpec
    True
    """
    if name not in MODULES:
        raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
    return importlib.import_module(f"{PACKAGE}.{name}")
