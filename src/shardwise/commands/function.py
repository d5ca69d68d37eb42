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
            raise UsageError(f"{name} has no {function!r}: write {name}:NAME with a function that it defines")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{text} is a {type(found).__name__}, not a function: name a function of your program")
    return found


def call_with_mesh(function: Callable[..., object], mesh: object) -> object:
    """Call a function with the mesh, or without it if it needs no arguments."""
    needs = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind not in _MANY]
    if len(needs) > 1:
        raise UsageError(
            f"{function.__name__} needs {len(needs)} arguments: give all but the first, the mesh, a default"
        )
    if needs and mesh is None:
        raise UsageError(f"{function.__name__} needs an argument, the mesh: add --mesh dp=2,tp=4")
    return function(mesh) if needs else function()


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        path = Path(name)
        if not path.exists():
            raise UsageError(f"there is no file {name}: write its path from the current folder, {Path.cwd()}")
        return _module_in_file(path)
    if "" not in sys.path:  # finds modules of the current folder, as `python -m` does
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # an import inside the program fails
        raise UsageError(
            f"there is no module {name}: write one that Python finds, or the path of a file, as program.py:function"
        ) from None


def _module_in_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be loaded as a Python file: name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
