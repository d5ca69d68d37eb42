"""The argument MODULE:FUNCTION: a function of the user's program, and the world it runs in."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ..sharding.mesh import DeviceMesh, init_device_mesh
from .command import UsageError
from .mesh import parse_mesh, simulated_mesh

Function = Callable[..., object]


def add_program_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the argument MODULE:FUNCTION."""
    text = f"{what}, such as train:step or path/to/train.py:step; it gets the mesh if it has a parameter"
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=text)


def load_function(text: str) -> Function:
    """Return the function named `package.module:function`, or `path/to/file.py:function`."""
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{text!r} is no MODULE:FUNCTION: write train:step, or path/to/train.py:step")
    found: object = _module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module_name} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{text} is a {type(found).__name__}, not a function")
    return found


def _module(name: str) -> object:
    if not name.endswith(".py"):
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and not name.startswith(error.name):
                raise  # the module is there, and imports one that is not
            raise UsageError(f"there is no module {name}: give its path, such as path/to/train.py:step") from None
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"there is no file {name}")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path/to/train.py` does
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def program_mesh(mesh: str | None) -> Iterator[DeviceMesh | None]:
    """Yield the mesh of --mesh: over the ranks of torchrun, or else over simulated ones. None if none is given."""
    if mesh is None:
        yield None
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        sizes = parse_mesh(mesh)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            yield init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    else:
        with simulated_mesh(mesh) as simulated:
            yield simulated


def call(function: Function, mesh: DeviceMesh | None) -> object:
    """Call a function of the user: with the mesh if it has a parameter for it."""
    wanted = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(wanted) > 1:
        raise UsageError(
            f"{function.__name__} has {len(wanted)} parameters without defaults: it may have one, the mesh"
        )
    if wanted and mesh is None:
        raise UsageError(f"{function.__name__} has a parameter, so it needs a mesh: add --mesh dp=2,tp=4")
    return function(mesh) if wanted else function()
