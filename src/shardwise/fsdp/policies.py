"""Options of `fully_shard` for mixed precision and CPU offloading."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a module computes and reduces; its sharded parameters keep their own.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    """

    param_dtype: torch.dtype | None = None
    """The dtype in which parameters are gathered and used. None: their own."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are reduced, and accumulated without reduction. None: that of the gradients."""
    output_dtype: torch.dtype | None = None
    """The dtype to which floating-point outputs of the module are cast. None: they are not cast."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of the module are cast to `param_dtype`."""


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: parameters and gradients stay on the device of the mesh.

    >>> model = fully_shard(model, mesh=mesh["dp"], offload_policy=OffloadPolicy())     # the default
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Offload sharded parameters and gradients to host memory, so that the optimizer runs on the CPU.

    A local shard is copied to the device before a gather, and its gradient back to the host after the reduction.

    >>> model = fully_shard(model, mesh=mesh["dp"], offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True
    """Whether that host memory is pinned, so that copies overlap with computation."""
