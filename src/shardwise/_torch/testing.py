"""PyTorch's operator database, which ops have a CPU kernel, and a store between processes: for `shardwise.testing`.

PyTorch tests itself with `torch.testing._internal`. It is imported on first use, which takes seconds. `FileStore` is
public as `torch.distributed.FileStore`, but only its private name has type stubs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Protocol

import torch
from torch._C._distributed_c10d import FileStore

from .ops import OpOverload

__all__ = ["FileStore", "OpInfo", "SampleInput", "operator_database", "runs_on_cpu"]

CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""The dispatch keys under which an op that runs on a CPU is registered."""


class SampleInput(Protocol):
    """One call of an entry: `entry.op(input, *args, **kwargs)`."""

    input: object
    args: tuple[object, ...]
    kwargs: dict[str, object]
    broadcasts_input: bool
    output_process_fn_grad: Callable[[object], object]


class OpInfo(Protocol):
    """An entry of the operator database, with the attributes that shardwise uses."""

    name: str
    variant_test_name: str
    aten_name: str
    supports_out: bool
    supports_autograd: bool

    @property
    def op(self) -> Callable[..., object]:
        """The function."""

    @property
    def inplace_variant(self) -> Callable[..., object] | None:
        """The method that writes its result into the input, if there is one."""

    def supports_dtype(self, dtype: torch.dtype, device_type: str) -> bool:
        """Return whether the op accepts the dtype."""

    def supported_dtypes(self, device_type: str) -> set[torch.dtype]:
        """Return the dtypes that the op accepts."""

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterable[SampleInput]:
        """Return sample calls."""


@lru_cache(maxsize=1)
def operator_database() -> dict[str, OpInfo]:
    """Return the entries of PyTorch's operator database by name; variants of an op have names such as `norm:fro`.

    Relies on `torch.testing._internal.common_methods_invocations.op_db`.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}:{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def runs_on_cpu(func: OpOverload) -> bool:
    """Return whether an op has a kernel for CPU tensors.

    Relies on `torch._C._dispatch_has_kernel_for_dispatch_key`.
    """
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in CPU_KEYS)
