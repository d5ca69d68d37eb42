"""The argument module:function: a function of the user's program."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from .command import UsageError

HELP = "a function of your program: package.module:function, or path/to/program.py:function"

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load_function(text: str) -> Callable[..., object]:
    """Return the function that `package.module:function` or `path/to/program.py:function` names."""
    name, separator, function = text.rpartition(":")
    if not separator or not name or not function:
        raise UsageError(f"{text!r} names no function: write module:function, or program.py:function")
    found: object = _module(name)
    for part in function.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{name} has no {function!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{text} is no function")
    return found


def call_with_mesh(function: Callable[..., object], mesh: object) -> object:
    """Call a function with the mesh, or without it if it needs no arguments."""
    needs = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind not in _MANY]
    if len(needs) > 1:
        raise UsageError(f"{function.__name__} needs {len(needs)} arguments: it may need one, the mesh")
    if needs and mesh is None:
        raise UsageError(f"{function.__name__} needs an argument, the mesh: add --mesh dp=2,tp=4")
    return function(mesh) if needs else function()


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        path = Path(name)
        if not path.exists():
            raise UsageError(f"there is no file {name}")
        return _module_in_file(path)
    if "" not in sys.path:  # as `python -m` does: programs of the present folder
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the program itself lacks something
        raise UsageError(f"there is no module {name}") from None


def _module_in_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
