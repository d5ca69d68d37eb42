"""Install and uninstall all overrides.

Functions in Python are wrapped when this module is imported, so that code that imports one by name after shardwise
gets the wrapped one. Kernels, which take a while to register, and all that imports `torch.distributed.checkpoint` wait
for the first mesh.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

from .._torch.above_autograd import Overrides
from .._torch.schemas import composites_with_out, is_composite
from .._torch.transforms import BATCHED
from ..dispatch.formulas import hook_registration, unpack_hook_wrapping
from ..ops.registry import registry
from .batch_rules import batched_taking_plain_as_replicated
from .composites import taking_plain_as_replicated
from .data_parallel import install_data_parallel, uninstall_data_parallel
from .derivatives import marking_formulas
from .out_arguments import copying_into_out
from .python_functions import install_python_functions, uninstall_python_functions
from .safetensors_writer import install_safetensors_writer, uninstall_safetensors_writer
from .state_dicts import install_state_dict_functions, uninstall_state_dict_functions

_overrides = Overrides()


def install_overrides() -> None:
    """Override the PyTorch functions that need it to run on distributed tensors. A second call does nothing."""
    if not len(_overrides):
        _add_kernels()
    hook_registration.install()
    unpack_hook_wrapping.install()
    install_python_functions()
    _flex_attention().install_flex_attention()
    install_state_dict_functions()
    install_safetensors_writer()
    install_data_parallel()


def uninstall_overrides() -> None:
    """Restore PyTorch's own functions. Those that need an override then fail on distributed tensors."""
    _overrides.remove()
    hook_registration.uninstall()
    unpack_hook_wrapping.uninstall()
    uninstall_python_functions()
    _flex_attention().uninstall_flex_attention()
    uninstall_state_dict_functions()
    uninstall_safetensors_writer()
    uninstall_data_parallel()


def _flex_attention() -> ModuleType:
    """Return the module that imports PyTorch's flex_attention, on first use: that import is slow."""
    return importlib.import_module(f"{__package__}.flex_attention")


def _add_kernels() -> None:
    with suppress(ImportError):  # PyTorch defines some of the ops when this is first imported
        importlib.import_module("torch.nn.modules.linear_cross_entropy")
    for func, op in registry.overloads_with(lambda op: op.override and not op.makes_tensors):
        assert op.override is not None
        _overrides.add(func, op.override(func))
    for func, op in registry.overloads_with(lambda op: op.makes_tensors):
        if is_composite(func):
            otherwise = taking_plain_as_replicated(func)
            _overrides.add(func, otherwise if op.override is None else _first_of(op.override(func), otherwise))
    for func, _ in registry.overloads_with(lambda op: op.derivative_makes_tensors):
        _overrides.add(func, marking_formulas(func))
    for func, _ in registry.overloads_with(lambda op: op.batch_rule_makes_tensors):
        _overrides.add(func, batched_taking_plain_as_replicated(func), BATCHED)
    for func in composites_with_out():
        _overrides.add(func, copying_into_out(func))


def _first_of(kernel: Callable[..., object], otherwise: Callable[..., object]) -> Callable[..., object]:
    """Return a kernel that falls back to the second one if the first returns NotImplemented."""

    def run(*args: object, **kwargs: object) -> object:
        found = kernel(*args, **kwargs)
        return otherwise(*args, **kwargs) if found is NotImplemented else found

    return run


install_python_functions()
