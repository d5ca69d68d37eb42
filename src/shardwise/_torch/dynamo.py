"""Dynamo, the frontend of `torch.compile`: what it must not trace, what it records as one call, and what is constant.

Dynamo takes a second to import, so this module does not import it, and configures it when a program imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import TypeVar

import torch
import torch.distributed.device_mesh

from .modes import without_modes

__all__ = [
    "break_graph",
    "compiles",
    "constant_in_graphs",
    "forget_last_trace",
    "in_graph",
    "never_traced",
    "real_object",
]

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)
T = TypeVar("T")

_NAME = "torch._dynamo"
_waiting: list[Callable[[], None]] = []


# ---- when Dynamo is imported ----------------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Dynamo as the other finders do, but with a loader of ours; then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Imports Dynamo with its own loader, then calls the waiting callbacks."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self.own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        module.__loader__ = self.own
        self.own.exec_module(module)
        while _waiting:
            _waiting.pop(0)()


def _when_imported(callback: Callable[[], None]) -> None:
    """Call this as soon as Dynamo is imported: now, if it is already."""
    if hasattr(sys.modules.get(_NAME), "allow_in_graph"):
        callback()
        return
    if not _waiting:
        sys.meta_path.insert(0, _Finder())
    _waiting.append(callback)


# ---- configuring Dynamo ---------------------------------------------------------------------------------------------


def in_graph(function: F) -> F:
    """Let Dynamo record calls of this function as one call in its graph, through which AOTAutograd traces later.

    Relies on `torch.compiler.allow_in_graph`. Arguments and results are tensors, numbers, containers, meshes, and
    objects of classes that are `constant_in_graphs`.
    """
    _when_imported(lambda: torch.compiler.allow_in_graph(function) and None)
    return function


def never_traced(modules: Iterable[str]) -> None:
    """Let Dynamo never trace these modules and packages: it breaks its graph at calls of them, and runs them.

    Relies on `torch._dynamo.trace_rules.add`. Without this, Dynamo would trace every frame that begins while it is on,
    also those of `__torch_dispatch__`.
    """

    def callback() -> None:
        from torch._dynamo import trace_rules

        for name in modules:
            trace_rules.add(name)

    _when_imported(callback)


def constant_in_graphs(cls: C) -> C:
    """Let graphs hold objects of this class, which do not change, as constants. A copy of one is itself.

    Relies on `register_opaque_type`. Dynamo reads attributes and calls methods of the object itself. PyTorch 2.11
    accepts only classes with a metaclass of its own, and breaks its graphs where these objects are arguments.
    """
    try:
        from torch._library.opaque_object import MemberType, register_opaque_type
    except ImportError:
        return cls
    if "members" not in inspect.signature(register_opaque_type).parameters:
        return cls
    members = {name: MemberType.USE_REAL for name in dir(cls) if not name.startswith("__")}
    if not hasattr(cls, "__deepcopy__"):
        cls.__deepcopy__ = _itself  # type: ignore[attr-defined]
    if not hasattr(cls, "__fx_repr__"):
        cls.__fx_repr__ = _fx_repr  # type: ignore[attr-defined]
    if cls.__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        cls.__eq__, cls.__hash__ = _is_same, object.__hash__  # type: ignore[assignment, method-assign]
    with suppress(TypeError):
        register_opaque_type(cls, typ="value", members=members)
    return cls


def _fx_repr(self: object) -> tuple[str, dict[str, object]]:
    """Return a name for the object in the code of a graph, and the object by this name."""
    name = f"{type(self).__name__}_{id(self):x}"
    return name, {name: self}


def _itself(self: object, memo: dict[int, object]) -> object:
    return self


def _is_same(self: object, other: object) -> bool:
    return self is other


def real_object(value: T) -> T:
    """Return the mesh for which Dynamo and AOTAutograd trace a stand-in; other values unchanged.

    Relies on `real_obj`.
    """
    return getattr(value, "real_obj", value)


def compiles() -> bool:
    """Return whether `torch.compile` or `torch.export` is tracing in this thread.

    Relies on `TracingContext.try_get`.
    """
    return torch._guards.TracingContext.try_get() is not None


def forget_last_trace() -> None:
    """Clear globals of PyTorch that hold fake tensors of the last trace until the next one: they refer to real meshes.

    Relies on `PhiloxStateTracker.reset`, which AOTAutograd calls before and after it traces, but while tensors are
    fake, and on `_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT`, which holds the nodes of an exported graph.
    """
    if compiles():
        return
    tracker = getattr(sys.modules.get("torch._decomp.decompositions_for_rng"), "PhiloxStateTracker", None)
    if tracker is not None:
        with without_modes():
            tracker.reset()
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    getattr(tracing, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()


def break_graph(reason: str) -> None:
    """Let Dynamo, if it is tracing, break its graph here, since what follows cannot be compiled.

    Relies on `unimplemented`.
    """
    if compiles():
        from torch._dynamo.exc import unimplemented

        unimplemented(gb_type=reason, context="", explanation="shardwise runs this without a graph", hints=[])


def _meshes_in_graphs() -> None:
    """Let graphs have meshes as inputs.

    Relies on `_register_distributed_opaque_types`. PyTorch's DTensor calls it when it is imported, but it is not
    imported after `shardwise.install()`.
    """
    register = getattr(torch.distributed.device_mesh, "_register_distributed_opaque_types", None)
    if register is not None:
        register()


_when_imported(_meshes_in_graphs)
