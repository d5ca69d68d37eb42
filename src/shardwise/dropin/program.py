"""Programs that are started by `python -m shardwise.run`."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType
from typing import Any

from ..errors import InputError
from .install import install

_KEPT = ("__name__", "__builtins__", "__spec__", "__loader__")
_PROGRAM = "SHARDWISE_RUN"
"""The environment variable by which spawned processes know the program: "file PATH" or "module NAME"."""


class _ProgramSpec(ModuleSpec):
    """The spec of `shardwise.run`, so that spawned processes import that, with the package of the program."""

    package = ""

    @property
    def parent(self) -> str:
        return self.package


def prepare(namespace: dict[str, object]) -> CodeType:
    """Install shardwise, make a module's namespace that of the program on the command line, and return its code."""
    install()
    if namespace["__name__"] == "__main__":
        _read_arguments()
    for name in [name for name in namespace if name not in _KEPT]:
        del namespace[name]
    kind, _, program = os.environ[_PROGRAM].partition(" ")
    return _module_code(program, namespace) if kind == "module" else _file_code(program, namespace)


def _read_arguments() -> None:
    """Make `sys.argv` and `sys.path` those of the program."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    program = arguments[as_module:]
    if not program:
        raise InputError("shardwise.run got no program", "write `python -m shardwise.run program.py`")
    sys.argv = program
    sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(program[0]))
    os.environ[_PROGRAM] = f"module {program[0]}" if as_module else f"file {os.path.abspath(program[0])}"


def _file_code(path: str, namespace: dict[str, object]) -> CodeType:
    with open(path, "rb") as file:
        source = file.read()
    namespace.update(__file__=path, __doc__=None, __package__=None)
    _set_spec(namespace, "")
    return compile(source, path, "exec")


def _module_code(name: str, namespace: dict[str, object]) -> CodeType:
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise InputError(
            f"shardwise.run -m {name}: there is no such module", f"check the name; the current folder is {os.getcwd()}"
        )
    code: CodeType = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    namespace.update(__file__=spec.origin, __doc__=None, __package__=spec.parent)
    _set_spec(namespace, spec.parent or "")
    sys.argv[0] = spec.origin or name
    return code


def _set_spec(namespace: dict[str, Any], package: str) -> None:
    given: ModuleSpec = namespace["__spec__"]
    found = _ProgramSpec(given.name, given.loader, origin=given.origin)
    found.package = package
    namespace["__spec__"] = found
