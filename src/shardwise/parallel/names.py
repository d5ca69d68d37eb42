"""Styles by the names that model hubs give them: `{"layers.*.attn.q_proj": "colwise"}`.

Hub plans name modules, and also parameters, such as the stacked weights of experts. A style name for both means the
same for both: `colwise` shards output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..sharding.placement import InterleavedShard, Partial, Placement, Replicate, Shard
from .base import ParallelStyle
from .experts import ExpertsParallel, IdentityExpert, SummedParallel
from .styles import (
    ColwiseParallel,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    ReplicatedOnShards,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    SharedKeyProjection,
)


class Unchanged(ParallelStyle):
    """Leave a module unchanged, e.g. a router over the experts of all ranks, which computes the same on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


NAMED: dict[str, Callable[[bool], ParallelStyle]] = {
    "colwise": lambda local: ColwiseParallel(use_local_output=local),
    "colwise_rep": lambda local: ColwiseParallel(output_layouts=Replicate(), use_local_output=local),
    "colwise_gather_output": lambda local: ColwiseParallel(output_layouts=Replicate(), use_local_output=local),
    "packed_colwise": lambda local: PackedColwiseParallel(use_local_output=local),
    "rowwise": lambda local: RowwiseParallel(use_local_output=local),
    "rowwise_rep": lambda local: RowwiseParallel(input_layouts=Replicate(), use_local_output=local),
    "rowwise_split_input": lambda local: RowwiseParallel(input_layouts=Replicate(), use_local_output=local),
    "packed_rowwise": lambda local: PackedRowwiseParallel(use_local_output=local),
    "embedding_rowwise": lambda local: RowwiseParallel(use_local_output=local),
    "embedding_colwise": lambda local: ColwiseParallel(output_layouts=Replicate(), use_local_output=local),
    "vocab_parallel_rowwise": lambda local: RowwiseParallel(use_local_output=local),
    "local_colwise": lambda local: ColwiseParallel(use_local_output=local),
    # The Partial output is summed by an outer module with "gather" or "all_reduce".
    "local_rowwise": lambda local: RowwiseParallel(output_layouts=Partial(), use_local_output=local),
    "gather": lambda local: SummedParallel(use_local_output=local),
    "all_reduce": lambda local: SummedParallel(use_local_output=local),
    "sequence_parallel": lambda local: SequenceParallel(use_local_output=local),
    "replicate": lambda local: ReplicateParallel(use_local_output=local),
    "replicated_with_grad_allreduce": lambda local: ReplicatedOnShards(use_local_output=local),
    "mla_kv_a_proj": lambda local: ReplicateParallel(use_local_output=local),
    "moe_tp_experts": lambda local: ExpertsParallel(use_local_output=local),
    "ep_dispatch_experts": lambda local: ExpertsParallel(use_local_output=local),
    "moe_identity_expert": lambda local: IdentityExpert(),
    "ep_router": lambda local: Unchanged(),
}

# The placement of a parameter by its number of dims. A vector has only output features.
_OUTPUTS: Callable[[int], Placement] = lambda ndim: Shard(max(ndim - 2, 0))  # noqa: E731
_INPUTS: Callable[[int], Placement] = lambda ndim: Shard(ndim - 1) if ndim > 1 else Replicate()  # noqa: E731

PARAMETERS: dict[str, Callable[[int], Placement]] = {
    "colwise": _OUTPUTS,
    "local_colwise": _OUTPUTS,
    "packed_colwise": lambda ndim: InterleavedShard(max(ndim - 2, 0), 2),
    "rowwise": _INPUTS,
    "local_rowwise": _INPUTS,
    "packed_rowwise": lambda ndim: InterleavedShard(ndim - 1, 2) if ndim > 1 else Replicate(),
    "grouped_gemm": lambda ndim: Shard(0),
    "replicate": lambda ndim: Replicate(),
    "replicated_with_grad_allreduce": lambda ndim: Replicate(),
}


class NamedStyle(ParallelStyle):
    """The style of a hub's plan by its name, for a module or a parameter."""

    def __init__(self, name: str, use_local_output: bool = True) -> None:
        known = {**NAMED, **PARAMETERS}
        if name not in known:
            raise InputError(f"there is no style named {name!r}", f"use a ParallelStyle, or one of {', '.join(known)}")
        self.name, self.use_local_output = name, use_local_output

    def for_module(self, parent: nn.Module | None = None) -> ParallelStyle:
        """Return the style for a module that is a child of `parent`."""
        if self.name not in NAMED:
            raise InputError(f"the style {self.name!r} is for parameters", f"for modules use one of {', '.join(NAMED)}")
        shared = getattr(parent, "qk_rope_head_dim", None)
        if self.name == "mla_kv_a_proj" and self.use_local_output:
            if not isinstance(shared, int):
                raise InputError(
                    f"the style {self.name!r} needs the attribute qk_rope_head_dim, the number of features that all "
                    f"heads share, on the module around its own, a {type(parent).__name__}",
                    "keep outputs distributed: hub_plan(plan, use_local_output=False)",
                )
            style: ParallelStyle = SharedKeyProjection(shared)
        else:
            style = NAMED[self.name](self.use_local_output)
        style.axis, style.src_data_rank = self.axis, self.src_data_rank
        return style

    def for_parameter(self, ndim: int) -> Placement:
        """Return the placement of a parameter with this number of dims."""
        if self.name not in PARAMETERS:
            raise InputError(
                f"the style {self.name!r} is for modules", f"for parameters use one of {', '.join(PARAMETERS)}"
            )
        return PARAMETERS[self.name](ndim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.for_module()._apply(module, device_mesh)


def hub_plan(plan: Mapping[str, str], *, use_local_output: bool = True) -> dict[str, ParallelStyle | str]:
    """Return the plan of a model hub with styles for its names.

    By default the styles return local outputs, as the hub's models expect them. With `use_local_output=False` all
    activations are DTensors, and results equal those of one device, whatever the plan.

    >>> parallelize_module(model, mesh, hub_plan(model.tp_plan, use_local_output=False))
    """
    return {path: NamedStyle(name, use_local_output) for path, name in plan.items()}
