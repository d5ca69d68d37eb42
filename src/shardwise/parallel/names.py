"""Styles by the names that model hubs give them: `{"layers.*.attn.q_proj": "colwise"}`."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InputError
from ..sharding.placement import Partial, Replicate
from .base import ParallelStyle
from .prepare import PrepareModuleOutput
from .styles import ColwiseParallel, ReplicateParallel, RowwiseParallel, SequenceParallel

NAMED: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel,
    "vocab_parallel_rowwise": RowwiseParallel,
    "local_colwise": ColwiseParallel,
    "local_rowwise": lambda: RowwiseParallel(output_layouts=Partial()),  # a "gather" of an outer module sums it
    "gather": lambda: PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicate": ReplicateParallel,
}


def named_style(name: str) -> ParallelStyle:
    """Return a new style of this name."""
    if name not in NAMED:
        raise InputError(f"there is no style named {name!r}", f"use a ParallelStyle, or one of {', '.join(NAMED)}")
    return NAMED[name]()
