"""How each kind of module is partitioned: which dim of which parameter is sharded, and the layouts that follow from it.

| module | column-wise: outputs are sharded | row-wise: inputs are sharded, outputs are summed |
|---|---|---|
| Linear | `weight[0]`, `bias[0]` | `weight[1]` |
| Embedding | `weight[1]` | `weight[0]`, the vocabulary |
| Conv | `weight[0]`, `bias[0]` | `weight[1]` |
| ConvTranspose | `weight[1]`, `bias[0]` | `weight[0]` |
| MultiheadAttention | by heads: input projections column-wise, the output projection row-wise | |

Any module with `in_features`, `out_features` and a weight of that shape counts as a Linear. One with `nf` output
features and a weight `[inputs, nf]` is a transposed Linear, as in GPT-2. An adapter around a `base_layer` is
partitioned like that layer, and with it one of the two low-rank matrices that the adapter adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

from torch import nn

from ..errors import InputError, PlacementError
from ..nn.parameters import own_tensors
from ..sharding.placement import AnyShard, InterleavedShard, Placement, Replicate, Shard

SUPPORTED = "nn.Linear and modules like it, nn.Embedding, convolutions"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class Partition(NamedTuple):
    """The placements of the sharded parameters, by name, and the layouts of input and output."""

    parameters: dict[str, Placement]
    input: Placement
    output: Placement
    input_size: int | None = None
    """The global size of the dim in which the input is sharded, if the module determines it."""
    inputs: int = 1
    """How many of the leading arguments have the input's layout."""


def colwise(module: nn.Module) -> Partition:
    """Return the partition in which each rank computes a shard of the output features."""
    if isinstance(module, nn.MultiheadAttention):
        return _by_heads(module)
    if (base := _base_layer(module)) is not None:
        return _adapted(colwise(base), module, ("lora_B",), colwise, {"lora_embedding_B": Shard(0)})
    if is_linear(module):
        return Partition({"weight": Shard(0), "bias": Shard(0)}, Replicate(), Shard(-1))
    if is_transposed_linear(module):
        return Partition({"weight": Shard(1), "bias": Shard(0)}, Replicate(), Shard(-1))
    if isinstance(module, nn.Embedding):
        return Partition({"weight": Shard(1)}, Replicate(), Shard(-1))
    if isinstance(module, _CONVOLUTIONS):
        output_dim = 1 if isinstance(module, _TRANSPOSED) else 0
        if module.groups > 1 and output_dim == 1:
            raise _grouped("ColwiseParallel", module, "out_channels")
        return Partition({"weight": Shard(output_dim), "bias": Shard(0)}, Replicate(), Shard(_channel_dim(module)))
    raise _not_supported("ColwiseParallel", module, f"{SUPPORTED}, nn.MultiheadAttention")


def rowwise(module: nn.Module) -> Partition:
    """Return the partition in which each rank reads a shard of the input features and computes a term of a sum."""
    if (base := _base_layer(module)) is not None:
        return _adapted(rowwise(base), module, ("lora_A",), rowwise, {"lora_embedding_A": Shard(1)})
    if is_linear(module):
        return Partition({"weight": Shard(1)}, Shard(-1), Replicate(), int(module.in_features))
    if is_transposed_linear(module):
        return Partition({"weight": Shard(0)}, Shard(-1), Replicate(), own_tensors(module)["weight"].shape[0])
    if isinstance(module, nn.Embedding):
        return Partition({"weight": Shard(0)}, Replicate(), Replicate())
    if isinstance(module, _CONVOLUTIONS):
        input_dim = 0 if isinstance(module, _TRANSPOSED) else 1
        if module.groups > 1 and input_dim == 1:
            raise _grouped("RowwiseParallel", module, "in_channels")
        return Partition({"weight": Shard(input_dim)}, Shard(_channel_dim(module)), Replicate(), module.in_channels)
    raise _not_supported("RowwiseParallel", module, SUPPORTED)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is an nn.Linear, or has its sizes and a weight of that shape."""
    if isinstance(module, nn.Linear):
        return True
    weight = own_tensors(module).get("weight")
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return isinstance(weight, nn.Parameter) and None not in sizes and tuple(weight.shape) == sizes


def is_transposed_linear(module: nn.Module) -> bool:
    """Return whether a module has `nf` output features and a weight `[inputs, nf]`."""
    weight = own_tensors(module).get("weight")
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]


def packed(partition: Partition, blocks: int = 2) -> Partition:
    """Return the partition with each sharded dim made of `blocks` equal blocks, each of them sharded."""

    def interleaved(placement: Placement) -> Placement:
        return InterleavedShard(placement.dim, blocks) if isinstance(placement, AnyShard) else placement

    parameters = {name: interleaved(placement) for name, placement in partition.parameters.items()}
    return partition._replace(
        parameters=parameters, input=interleaved(partition.input), output=interleaved(partition.output)
    )


def _base_layer(module: nn.Module) -> nn.Module | None:
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else None


def _adapted(
    base: Partition,
    module: nn.Module,
    adapters: tuple[str, ...],
    partition: Callable[[nn.Module], Partition],
    parameters: dict[str, Placement],
) -> Partition:
    """Return the partition of an adapter: its modules `adapters` by `partition`, and its `parameters` as given."""
    found = {f"base_layer.{name}": placement for name, placement in base.parameters.items()}
    for name in adapters:
        for key, adapter in (getattr(module, name, None) or nn.ModuleDict()).items():
            found |= {f"{name}.{key}.{own}": p for own, p in partition(adapter).parameters.items()}
    for name, placement in parameters.items():
        found |= {f"{name}.{key}": placement for key in (getattr(module, name, None) or {})}
    return base._replace(parameters=found)


def _by_heads(module: nn.MultiheadAttention) -> Partition:
    """Return the partition by heads.

    The packed weight is [q; k; v]. Each of the three blocks is sharded, so that a rank holds the same heads of all.
    """
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise PlacementError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn cannot be sharded by heads",
            "replicate it with SequenceParallel or distribute_module",
        )
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    separate: dict[str, Placement] = {name: Shard(0) for name in names}
    packed: dict[str, Placement] = {"in_proj_weight": InterleavedShard(0, 3), "in_proj_bias": InterleavedShard(0, 3)}
    return Partition({**separate, **packed, "out_proj.weight": Shard(1)}, Replicate(), Replicate(), inputs=3)


def _channel_dim(module: Convolution) -> int:
    """Return the dim of the channels, counted from the end since inputs may lack a batch dim."""
    return -1 - len(module.kernel_size)


def _grouped(style: str, module: Convolution, dim: str) -> PlacementError:
    return PlacementError(
        f"{style} cannot shard the {dim} of a {type(module).__name__} with groups={module.groups}: "
        "each group has its own, and a group may not be sharded",
        "use the other of ColwiseParallel and RowwiseParallel, which shards by groups, or replicate the module",
    )


def _not_supported(style: str, module: nn.Module, supported: str) -> InputError:
    return InputError(
        f"{style} cannot be applied to a {type(module).__name__}",
        f"it supports {supported}; for other modules use SequenceParallel, PrepareModuleInput and PrepareModuleOutput, "
        "or distribute_module with a partition_fn",
    )
