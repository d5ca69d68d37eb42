"""A call of `flex_attention` on distributed tensors, or on the local tensors of all simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..comm.on_ranks import shard_outside
from ..comm.redistribute import plan_redistribution
from ..dispatch.explicit import refuse
from ..errors import InputError, MeshError
from ..ops.above_autograd import needs_grad
from ..ops.attention_method import by_position, over_heads
from ..ops.captured_tensors import captured_tensors, with_captured
from ..ops.flex_blocks import Blocks, block_states
from ..ops.flex_layouts import FlexLayouts, choose_flex_method, flex_layouts, positions_axes
from ..ops.flex_local import FlexResult, Places, attend_locally
from ..ops.flex_places import places_of
from ..ops.modes import modes
from ..ops.sequence_options import sequence_mode
from ..sharding.base import DTensorBase
from ..sharding.layout import Coordinate, Factor, Layout
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Placement
from ..sharding.spec import DTensorSpec, contiguous_meta
from ..world import RankTensor
from .each_rank import ForEachRank

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class FlexOptions(NamedTuple):
    """The arguments of a call besides queries, keys and values."""

    score_mod: Callable[..., Tensor] | None
    block_mask: BlockMask | None
    scale: float
    wanted: tuple[bool, bool, bool] = (True, True, True)
    """Which results are returned: the output, the logsumexp, the largest scores."""

    @property
    def mask_mod(self) -> Callable[..., Tensor] | None:
        """The function of the block mask, if there is one."""
        return None if self.block_mask is None else self.block_mask.mask_mod

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of the block mask, if there is one."""
        mask = self.block_mask
        return None if mask is None else Blocks(block_states(mask), mask.BLOCK_SIZE)

    def with_captured(
        self, replace: Callable[[Tensor], Tensor]
    ) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]:
        """Return `score_mod` and the mask function with their captured tensors replaced."""
        return tuple(f and with_captured(f, replace) for f in (self.score_mod, self.mask_mod))  # type: ignore[return-value]


# ---- distributed tensors --------------------------------------------------------------------------------------------


def flex_of_distributed(query: Any, key: Any, value: Any, options: FlexOptions) -> FlexResult:
    """Return the attention of DTensors with any placements, sharded like the queries, and differentiable."""
    specs: tuple[DTensorSpec, ...] = query._spec, key._spec, value._spec
    mesh_info = specs[0].mesh_info
    if any(spec.mesh_info is not mesh_info for spec in specs):
        raise MeshError(
            f"flex_attention of {', '.join(map(repr, specs))} on different meshes",
            "bring them to one mesh first: x.redistribute(mesh, placements)",
        )
    axes = positions_axes(*specs)
    ranks = 1
    for axis in axes:
        ranks *= mesh_info.sizes[axis]
    zigzag = ranks if sequence_mode().zigzag else 0
    if axes and _method(query, key, value) == "heads":
        moved = [_to_layout(tensor, over_heads(tensor._spec.layout, axes)) for tensor in (query, key, value)]
        result: Any = _on_gathered(moved, options, zigzag)
        return FlexResult(
            *(
                _to_layout(one, by_position(one._spec.layout, axes)) if wanted else one
                for one, wanted in zip(result, options.wanted, strict=True)
            )
        )
    return _on_gathered([query, key, value], options, zigzag)


def _method(query: DTensorBase, key: DTensorBase, value: DTensorBase) -> str:
    """Return the requested method, or else the cheaper of "heads" and "gather". There is no ring."""
    specs: list[DTensorSpec] = [query._spec, key._spec, value._spec]
    asked = sequence_mode().method
    if asked is None:
        return choose_flex_method(specs[0], specs[1], specs[2], needs_grad((query, key, value))).method
    if asked == "heads" and not all(over_heads(spec.layout, positions_axes(*specs)) for spec in specs):
        raise InputError(
            f"flex_attention by heads of {', '.join(map(repr, specs))}: the ranks that share the sequence do not "
            "divide the heads",
            'use the method "gather", or a number of ranks that divides the number of heads of keys',
        )
    return asked


def _on_gathered(tensors: Sequence[DTensorBase], options: FlexOptions, zigzag: int) -> FlexResult:
    """Return the attention of each rank's queries with keys and values gathered along their positions."""
    specs = [tensor._spec for tensor in tensors]
    layouts, mesh_info = flex_layouts(*specs), specs[0].mesh_info
    targets = layouts.query, layouts.key, layouts.value
    gradients = layouts.query, layouts.key_gradient, layouts.value_gradient
    _refuse_if_explicit(specs, targets)
    locals_ = [
        _to_layout(tensor, target).to_local(grad_placements=_placements(tensor, gradient))
        for tensor, target, gradient in zip(tensors, targets, gradients, strict=True)
    ]
    blocks = options.blocks
    captured = captured_tensors(options.score_mod, options.mask_mod)
    held = [_local_captured(tensor, mesh_info, layouts) for tensor in captured]
    if mesh_info.outside:
        return FlexResult(*(_outside(spec, locals_[0].device) for spec in _result_specs(specs, layouts)))

    def at_rank(at: Coordinate, query: Tensor, key: Tensor, value: Tensor, *held: Tensor) -> FlexResult:
        found = {id(tensor): local for tensor, local in zip(captured, held, strict=True)}
        score_mod, mask_mod = options.with_captured(lambda tensor: found[id(tensor)])
        places = places_of(mesh_info, layouts, at, zigzag, query.device)
        return attend_locally(query, key, value, places, score_mod, mask_mod, blocks, options.scale, held)

    results = _on_each_rank(mesh_info, at_rank, (*locals_, *held))
    pairs = zip(results, _result_specs(specs, layouts), strict=True)
    return FlexResult(*(_from_local(local, spec) for local, spec in pairs))


def _result_specs(specs: Sequence[DTensorSpec], layouts: FlexLayouts) -> list[DTensorSpec]:
    """Return the specs of the output, the logsumexp and the largest scores."""
    dtype, mesh_info = specs[0].dtype, specs[0].mesh_info
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    made = (layouts.output, dtype), (layouts.logsumexp, precise), (layouts.logsumexp, precise)
    return [DTensorSpec.from_layout(mesh_info, layout, contiguous_meta(layout.shape, kind)) for layout, kind in made]


def _to_layout(tensor: Any, layout: Layout | None) -> Any:
    assert layout is not None
    return tensor if tensor._spec.layout is layout else tensor.redistribute(placements=_placements(tensor, layout))


def _placements(tensor: DTensorBase, layout: Layout) -> tuple[Placement, ...]:
    spec = DTensorSpec.from_layout(tensor._spec.mesh_info, layout, tensor._spec.tensor_meta)
    return spec.placements_alone


def _from_local(local: Tensor, spec: DTensorSpec) -> DTensorBase:
    made: Any = DTensorBase.concrete
    return made.from_local(
        local, spec.mesh, spec.placements_alone, shape=spec.shape, stride=contiguous_meta(spec.shape, spec.dtype).stride
    )


def _outside(spec: DTensorSpec, device: torch.device) -> DTensorBase:
    return DTensorBase.concrete.wrap(shard_outside(spec.ndim, spec.dtype, device), spec)


def _refuse_if_explicit(specs: Sequence[DTensorSpec], targets: Sequence[Layout]) -> None:
    if not modes.explicit:
        return
    moves = []
    for name, spec, target in zip(("query", "key", "value"), specs, targets, strict=True):
        wanted = spec.with_layout(target)
        if plan_redistribution(spec, wanted).plan.collectives:
            moves.append(f"{name} = {name}.redistribute(placements={list(wanted.placements_alone)})")
    if moves:
        refuse("flex_attention needs communication in explicit mode", "; ".join(moves))


def _local_captured(tensor: Tensor, mesh_info: MeshInfo, layouts: FlexLayouts) -> Tensor:
    """Return the local tensor of a captured tensor, replicated; its gradient is summed over `layouts.split_axes`."""
    if isinstance(tensor, DTensorBase):
        if tensor._spec.mesh_info is not mesh_info:
            raise MeshError(
                f"a function passed to flex_attention captures {tensor._spec!r} on {tensor._spec.mesh_info!r}, but the "
                f"queries are on {mesh_info!r}",
                "distribute it on the mesh of the queries",
            )
        replicated = Layout.make(mesh_info.sizes, [(Factor(size, ()),) for size in tensor.shape])
        gradient = Layout.make(
            mesh_info.sizes, replicated.dims, tuple((axis, "sum") for axis in sorted(layouts.split_axes))
        )
        local: Tensor = _to_layout(tensor, replicated).to_local(grad_placements=_placements(tensor, gradient))
        return local
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"a function passed to flex_attention of DTensors captures a plain tensor of shape {list(tensor.shape)} "
            "that requires grad: each rank would have one summand of its gradient",
            "distribute it: distribute_tensor(x, mesh, [Replicate()] * mesh.ndim)",
        )
    if isinstance(tensor, RankTensor) and len(tensor.shards) > len(mesh_info.ranks):
        return RankTensor([tensor.shards[rank] for rank in mesh_info.ranks])
    return tensor


# ---- local tensors -----------------------------------------------------------------------------------------


def _on_each_rank(
    mesh_info: MeshInfo, at_rank: Callable[..., FlexResult], tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the results of `at_rank(coordinate, *local tensors)`. Differentiable."""
    if not mesh_info.simulated:
        return at_rank(mesh_info.coordinate, *tensors)
    coordinates = mesh_info.coordinates
    return ForEachRank.apply(lambda rank, *local: at_rank(coordinates[rank], *local), len(coordinates), *tensors)


def flex_of_ranks(query: Tensor, key: Tensor, value: Tensor, options: FlexOptions) -> FlexResult:
    """Return attention of plain local tensors: of this rank, or of all simulated ranks, each with its own mask."""
    captured = captured_tensors(options.score_mod, options.mask_mod)
    blocks = options.blocks

    def at_rank(rank: int, query: Tensor, key: Tensor, value: Tensor, *held: Tensor) -> FlexResult:
        found = {id(tensor): local for tensor, local in zip(captured, held, strict=True)}
        score_mod, mask_mod = options.with_captured(lambda tensor: found[id(tensor)])
        own = blocks
        if blocks is not None and isinstance(blocks.states, RankTensor):
            own = blocks._replace(states=blocks.states.shards[rank])
        counts = [query.shape[0], query.shape[1], query.shape[2], key.shape[2]]
        indices = [torch.arange(count, device=query.device) for count in counts]
        shared = None if counts[1] == key.shape[1] else indices[1] // (counts[1] // key.shape[1])
        places = Places(indices[0], indices[1], indices[2], indices[3], shared)
        return attend_locally(query, key, value, places, score_mod, mask_mod, own, options.scale, held)

    if not isinstance(query, RankTensor):
        return at_rank(0, query, key, value, *captured)
    ranks = len(query.shards)
    return FlexResult(*ForEachRank.apply(at_rank, ranks, query, key, value, *captured))
