"""Parallelize modules by a plan, as `torch.distributed.tensor.parallel` does.

plan                parallelize_module
parameters          ColwiseParallel, RowwiseParallel, SequenceParallel
inputs and outputs  PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput
your own            ParallelStyle
loss                loss_parallel
"""

from .base import ParallelStyle
from .loss import loss_parallel
from .plan import parallelize_module
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
    "loss_parallel",
]
