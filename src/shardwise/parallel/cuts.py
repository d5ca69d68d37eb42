"""How each kind of module is cut: which dim of which parameter, and what that makes of inputs and outputs.

| module | by columns: outputs are cut | by rows: inputs are cut, outputs are summed |
|---|---|---|
| Linear | `weight[0]`, `bias[0]` | `weight[1]` |
| Embedding | `weight[1]` | `weight[0]`, the vocabulary |
| Conv | `weight[0]`, `bias[0]` | `weight[1]` |
| ConvTranspose | `weight[1]`, `bias[0]` | `weight[0]` |
| MultiheadAttention | by heads: inner projections by columns, the outer one by rows | |

A Linear is also any module with `in_features`, `out_features` and a weight of that shape.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..errors import InputError, PlacementError
from ..sharding.placement import InterleavedShard, Placement, Replicate, Shard

SERVED = "nn.Linear and modules like it, nn.Embedding, convolutions"


class Cut(NamedTuple):
    """The parameters that are cut, by name, and the layouts of inputs and outputs that go with it."""

    parameters: dict[str, Placement]
    input: Placement
    output: Placement
    input_size: int | None = None  # of the dim in which the input is cut
    inputs: int = 1  # so many leading arguments have the input's layout


def colwise(module: nn.Module) -> Cut:
    """Cut so that each rank makes a part of the outputs."""
    if isinstance(module, nn.MultiheadAttention):
        return _by_heads(module)
    if is_linear(module):
        return Cut({"weight": Shard(0), "bias": Shard(0)}, Replicate(), Shard(-1))
    if isinstance(module, nn.Embedding):
        return Cut({"weight": Shard(1)}, Replicate(), Shard(-1))
    if isinstance(module, _ConvNd):
        outputs = 1 if isinstance(module, _ConvTransposeNd) else 0
        if module.groups > 1 and outputs == 1:
            raise _grouped("ColwiseParallel", module, "out_channels")
        return Cut({"weight": Shard(outputs), "bias": Shard(0)}, Replicate(), Shard(_channels(module)))
    raise _cannot_serve("ColwiseParallel", module, f"{SERVED}, nn.MultiheadAttention")


def rowwise(module: nn.Module) -> Cut:
    """Cut so that each rank reads a part of the inputs, and makes a summand of the outputs."""
    if is_linear(module):
        return Cut({"weight": Shard(1)}, Shard(-1), Replicate(), int(module.in_features))  # type: ignore[arg-type]
    if isinstance(module, nn.Embedding):
        return Cut({"weight": Shard(0)}, Replicate(), Replicate())
    if isinstance(module, _ConvNd):
        inputs = 0 if isinstance(module, _ConvTransposeNd) else 1
        if module.groups > 1 and inputs == 1:
            raise _grouped("RowwiseParallel", module, "in_channels")
        return Cut({"weight": Shard(inputs)}, Shard(_channels(module)), Replicate(), module.in_channels)
    raise _cannot_serve("RowwiseParallel", module, SERVED)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear, or looks like one."""
    if isinstance(module, nn.Linear):
        return True
    weight = module._parameters.get("weight")
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return weight is not None and None not in sizes and tuple(weight.shape) == sizes


def _by_heads(module: nn.MultiheadAttention) -> Cut:
    """The packed weight is [q; k; v]: each is cut by itself, so that a rank holds the same heads of all three."""
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise PlacementError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn cannot be cut by heads",
            "replicate it with SequenceParallel or distribute_module",
        )
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    apart: dict[str, Placement] = {name: Shard(0) for name in names}
    packed: dict[str, Placement] = {"in_proj_weight": InterleavedShard(0, 3), "in_proj_bias": InterleavedShard(0, 3)}
    return Cut({**apart, **packed, "out_proj.weight": Shard(1)}, Replicate(), Replicate(), inputs=3)


def _channels(module: _ConvNd) -> int:
    """The channels' dim, counted from the end: inputs may lack a batch dim."""
    return -1 - len(module.kernel_size)


def _grouped(style: str, module: _ConvNd, dim: str) -> PlacementError:
    return PlacementError(
        f"{style} cannot cut the {dim} of a {type(module).__name__} with groups={module.groups}: "
        "each group has its own, and is held whole",
        "use the other of ColwiseParallel and RowwiseParallel, which cuts by groups, or replicate the module",
    )


def _cannot_serve(style: str, module: nn.Module, served: str) -> InputError:
    return InputError(
        f"{style} on a {type(module).__name__}",
        f"it serves {served}; for others use SequenceParallel, PrepareModuleInput and PrepareModuleOutput, "
        "or distribute_module with a partition_fn",
    )
