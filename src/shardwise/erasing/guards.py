"""Guards of a recording: it is replayed if nothing that the ops depend on, except tensor data, has changed.

The signature of a call (`signature_of`) is looked up: specs, shapes and values of the arguments, and modes. Guards are
checked one by one: the tensors, modules, optimizers and Python values that the step uses without getting them as
arguments.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import getitem, is_

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.module import register_module_forward_pre_hook

from .._torch import pytree
from .._torch.modules import buffers_of, modules_of, parameters_of
from ..errors import EraseError, InputError
from ..ops.captured_tensors import names_in
from ..ops.modes import current as current_modes
from ..random.draw import is_exact
from ..sharding.base import DTensorBase
from ..sharding.recording import recorder as active_recorder
from ..tensor.leaf_gradient import is_accumulating
from .optimizers import OptimizerStep
from .quick_check import Entry, quick_check
from .recorder import OpRecorder

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

Signature = tuple[object, ...]


# ---- the signature of a call ----------------------------------------------------------------------------------------


def signature_of(leaves: list[object], structure: object) -> Signature:
    """Return the signature of a call: the specs, shapes and values of its arguments, and the present modes."""
    return (structure, *map(_leaf_key, leaves), *modes())


def modes() -> tuple[object, ...]:
    """Return the modes that decide which ops run."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocast,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        current_modes.get(),
        is_exact(),
        is_accumulating(),
    )


def _leaf_key(value: object) -> object:
    if isinstance(value, DTensorBase):
        return value._spec, value.requires_grad
    if isinstance(value, Tensor):
        return type(value), tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    try:
        hash(value)
    except TypeError:
        raise InputError(
            f"an erased step got an argument of type {type(value).__name__}, which cannot be compared with later ones",
            "pass tensors, numbers and strings, or lists, tuples and dicts of them",
        ) from None
    return type(value), value


# ---- guards ---------------------------------------------------------------------------------------------------------


class Guards:
    """The values that must be unchanged: collected while a step is recorded, checked before each replay."""

    def __init__(self) -> None:
        self._dicts: list[Mapping[str, object]] = []
        self._keys: list[str] = []
        self._identical: list[object] = []
        self._values: list[Entry] = []
        self._cells: list[tuple[types.CellType, object]] = []
        self._locals: list[tuple[DTensorBase, Tensor, object]] = []
        self._grads: list[tuple[Tensor, object]] = []
        self._steps: list[OptimizerStep] = []
        self._seen: set[int] = set()
        self._quick: Callable[[], bool] | None = None
        self.optimizers: list[optim.Optimizer] = []
        """The optimizers that the step uses."""
        self.names: dict[int, str] = {}
        """Names of parameters and buffers, by the ids of their tensors."""

    def hold(self) -> bool:
        """Return whether everything is unchanged."""
        if self._quick is None:
            self._quick = self._write_quick_check()
        try:
            if self._quick() and self._grads_hold() and all(step.unchanged() for step in self._steps):
                return True
        except Exception:  # a guarded entry is gone, or its comparison failed
            pass
        return self.broken() is None

    def _write_quick_check(self) -> Callable[[], bool]:
        attributes: list[tuple[object, str, object]] = [(cell, "cell_contents", held) for cell, held in self._cells]
        attributes += [(tensor, "_shard", local) for tensor, local, _ in self._locals]
        attributes += [(tensor, "_spec", spec) for tensor, _, spec in self._locals]
        attributes += [(leaf, "grad", None) for leaf, spec in self._grads if spec is None]
        return quick_check(self._values, zip(self._dicts, self._keys, self._identical, strict=True), attributes)

    def _grads_hold(self) -> bool:
        return all(_grad_key(leaf) == spec for leaf, spec in self._grads if spec is not None)

    def broken(self) -> str | None:
        """Return what has changed, as text; None if nothing has."""
        try:
            if not all(map(is_, map(getitem, self._dicts, self._keys), self._identical)):
                return "a parameter, buffer, module or function was replaced"
        except KeyError as missing:
            return f"{missing} was deleted"
        for values, key, expected in self._values:
            if (found := values.get(key)) is not expected and found != expected:
                return f"{key} was {expected!r} and is {found!r}"
        for cell, expected in self._cells:
            if (found := cell.cell_contents) is not expected and not (_is_value(found) and found == expected):
                return "a variable of the step was replaced"
        for tensor, local, spec in self._locals:
            if getattr(tensor, "_shard", None) is not local or tensor._spec is not spec:
                return "a distributed tensor got other data or another spec"
        for leaf, spec in self._grads:
            if _grad_key(leaf) != spec:
                return "a gradient was None before and is not now, or the other way round"
        return None if all(step.unchanged() for step in self._steps) else "an optimizer got other parameters"

    def describe(self) -> str:
        """Return how many objects of each kind are guarded."""
        counts = {
            "distributed tensors": len(self._locals),
            "parameters, buffers and modules": len(self._identical),
            "options and numbers": len(self._values),
            "variables": len(self._cells),
            "gradients": len(self._grads),
            "optimizers": len(self._steps),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are guarded by identity: parameters, buffers and others."""
        return [value for value in self._identical if isinstance(value, Tensor)]

    # ---- filling ----------------------------------------------------------------------------------------------------

    def add_tensor(self, tensor: DTensorBase, local: Tensor) -> None:
        """Guard the local shard and spec of a distributed tensor."""
        self._locals.append((tensor, local, tensor._spec))

    def add_grad(self, leaf: Tensor, grad: object) -> None:
        """Guard whether a leaf has a gradient, and its spec."""
        self._grads.append((leaf, _key_of_grad(grad)))

    def add_steps(self, steps: list[OptimizerStep]) -> None:
        """Guard the parameters of optimizers."""
        self._steps += steps

    def add_module(self, module: nn.Module, name: str = "") -> None:
        """Guard the parameters, buffers, submodules and options of a module."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for kind in (parameters_of(module), buffers_of(module), modules_of(module)):
            for key, value in kind.items():
                self._identity(kind, key, value)
                if isinstance(value, Tensor):
                    self.names.setdefault(id(value), f"{name}_{key}".strip("_").replace(".", "_"))
        for key, value in module.__dict__.items():
            if _is_value(value) and (not key.startswith("_") and value is not None):
                self._values.append((module.__dict__, key, value))
        for key, child in modules_of(module).items():
            if child is not None:
                self.add_module(child, f"{name}.{key}".strip("."))

    def add_callable(self, fn: Callable[..., object]) -> None:
        """Guard a module, a callable object, or a function, and what it uses."""
        if isinstance(fn, nn.Module):
            self.add_module(fn)
        elif isinstance(fn, (types.FunctionType, types.MethodType)):
            self.add_function(fn)
        else:
            self._object(fn)

    def add_function(self, fn: Callable[..., object]) -> None:
        """Guard the variables that a function reads from outside: its closure, its globals, its object."""
        if id(fn) in self._seen:
            return
        self._seen.add(id(fn))
        if isinstance(fn, types.MethodType):
            self._object(fn.__self__)
            fn = fn.__func__
        if not isinstance(fn, types.FunctionType):
            return
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._cells.append((cell, cell.cell_contents))
            self._look_into(cell.cell_contents, name)
        for name in names_in(fn.__code__):
            if name in fn.__globals__:
                value = fn.__globals__[name]
                if _is_value(value):
                    self._values.append((fn.__globals__, name, value))
                elif not isinstance(value, types.ModuleType):
                    self._identity(fn.__globals__, name, value)
                self._look_into(value, name)

    def _object(self, owner: object) -> None:
        if isinstance(owner, nn.Module):
            self.add_module(owner)
            return
        values = getattr(owner, "__dict__", None)
        for key, value in (values or {}).items():
            if _is_value(value):
                self._values.append((values, key, value))  # type: ignore[arg-type]
            else:
                self._identity(values, key, value)  # type: ignore[arg-type]
                self._look_into(value, key)

    def _look_into(self, value: object, name: str) -> None:
        if isinstance(value, nn.Module):
            self.add_module(value, name)
        elif isinstance(value, optim.Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, Tensor):
            self.names.setdefault(id(value), name)
        elif isinstance(value, (types.FunctionType, types.MethodType)) and not _is_library(value):
            self.add_function(value)
        elif isinstance(value, (list, tuple)):
            for index, element in enumerate(value):
                self._look_into(element, f"{name}_{index}")

    def _identity(self, values: Mapping[str, object], key: str, value: object) -> None:
        self._dicts.append(values)
        self._keys.append(key)
        self._identical.append(value)

    def refuse_changes(self) -> None:
        """Raise an error if the recorded step has changed a guarded Python value, which a replay would not do."""
        for values, key, expected in self._values:
            if (found := values.get(key)) is not expected and found != expected:
                raise EraseError(
                    f"the step changes {key} from {expected!r} to {found!r}; a replay, which runs no Python, would not",
                    "move that line out of the step, or keep the value in a tensor",
                )


@contextmanager
def watching_modules(recorder: OpRecorder, guards: Guards) -> Iterator[None]:
    """Guard the modules that run inside the block."""

    def before(module: nn.Module, args: object) -> None:
        if active_recorder.get() is recorder:
            guards.add_module(module)

    handle = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def flatten(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[object], object]:
    """Return the tensors and values among the arguments, and how they are nested."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return leaves, structure


def _is_value(value: object) -> bool:
    return isinstance(value, _VALUES)


def _is_library(fn: Callable[..., object]) -> bool:
    return (getattr(fn, "__module__", None) or "").split(".")[0] in ("torch", "shardwise")


def _grad_key(leaf: Tensor) -> object:
    return _key_of_grad(leaf.grad)


def _key_of_grad(grad: object) -> object:
    if isinstance(grad, DTensorBase):
        return grad._spec
    return None if grad is None else "plain"
