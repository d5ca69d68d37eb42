"""The table of all ops: look-up by name, and which of them PyTorch composes of others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._C import DispatchKey

from .ops import OpOverload


def find_overload(name: str) -> OpOverload | None:
    """Return the overload of this name, such as `aten::add.Tensor`; None if this version of PyTorch has none."""
    space, _, op = name.partition("::")
    packet, _, overload = op.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)


def is_composite(func: OpOverload) -> bool:
    """Return whether autograd decomposes an op into others, and has no derivative of its own for it."""
    return func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def has_cpu_kernel(func: OpOverload) -> bool:
    """Return whether an op has a kernel for CPUs. If a composite op has one, it is not decomposed there."""
    return func.has_kernel_for_dispatch_key(DispatchKey.CPU)


def is_dispatched(func: OpOverload) -> bool:
    """Return whether the dispatcher has an op: `torch.ops` has functions of TorchScript, such as `__getitem__`.

    Relies on the RuntimeError that the dispatcher's table raises for other names.
    """
    try:
        is_composite(func)
    except RuntimeError:
        return False
    return True


def composites_with_out() -> Iterator[OpOverload]:
    """Yield the ATen ops with `out=` arguments that are composed of other ops."""
    for schema in torch._C._jit_get_all_schemas():
        if "out" not in schema.overload_name or not schema.name.startswith("aten::"):  # most of them
            continue
        func = find_overload(f"{schema.name}.{schema.overload_name}")
        if func is not None and is_composite(func) and any(argument.is_out for argument in schema.arguments):
            yield func
