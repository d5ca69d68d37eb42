"""Parallelize modules by a plan, as `torch.distributed.tensor.parallel` does.

plan                parallelize_module
parameters          ColwiseParallel, RowwiseParallel, SequenceParallel
inputs and outputs  PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput
experts             ExpertParallel
your own            ParallelStyle
loss                loss_parallel
model hubs          hub_plan
"""

from .base import ParallelStyle
from .expert_parallel import ExpertParallel
from .loss import loss_parallel
from .names import hub_plan
from .plan import parallelize_module
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "hub_plan",
    "parallelize_module",
    "loss_parallel",
]
