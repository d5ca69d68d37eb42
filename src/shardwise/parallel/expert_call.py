"""One call of experts whose tokens are routed.

| tokens over the axis | what happens | output over the axis |
|---|---|---|
| plain: each rank has its own | sent to their experts and back | plain |
| sharded | the same | sharded alike |
| replicated, many choices per token | each rank computes its own experts for all tokens | summed |
| replicated, few choices per token | each rank takes its share of the tokens, and sends them | gathered |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..comm.on_ranks import on_ranks
from ..comm.token_route import ExpertAxis, TokenRoute, own_rows, route_rows, route_sorted_rows
from ..dispatch.modes import modes
from ..errors import InputError
from ..ops.grouped_local import local_ends
from ..sharding.layout import Coordinate
from ..sharding.placement import AnyShard, Partial, Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from ..tensor.from_local import on_mesh
from ..world import RankTensor, map_ranks
from .axis import StyleAxis
from .token_exchange import to_experts, to_tokens, weighted_sum


class Arguments(NamedTuple):
    """What experts are called with: `(tokens, index, weights)`, or `(rows, counts)`."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor | None = None

    @property
    def is_sorted(self) -> bool:
        """Whether the tokens are sorted by expert, and the second argument counts them."""
        return self.weights is None and self.chosen.dim() == 1


class Placed(NamedTuple):
    """Placements for each mesh axis: of the inputs, of their local gradients, and of local outputs."""

    inputs: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True)
class ExpertCall:
    """How the experts of one module are called. `summed` are the axes that shard their hidden features.

    `mean` averages the gradients of the experts over ranks, for plain tokens.
    """

    axis: StyleAxis
    experts: ExpertAxis
    summed: set[int]
    mean: bool

    def start(self, given: Arguments, read_counts: bool) -> Runner:
        """Route the tokens of a call."""
        tokens = given.tokens
        if not isinstance(tokens, DTensor) and modes.implicit_replication:
            tokens = self._replicated(tokens)
        if not isinstance(tokens, DTensor):
            self._check_local(given)
            return Runner(self, given, None, None, read_counts)
        found, wanted = tokens._spec.mesh_info, self.axis.mesh_info
        if found is not wanted:
            raise InputError(
                f"tokens {tokens._spec!r} are on {found!r}, and the experts on {wanted!r}",
                "distribute tokens over the mesh of the experts, or apply ExpertParallel to the mesh of the tokens",
            )
        placed = self._placed(tokens, given)
        others = [self._replicated(t) if modes.implicit_replication else t for t in given[1:] if t is not None]
        return Runner(self, Arguments(tokens, *others), placed, tokens, read_counts)

    def _replicated(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.axis.mesh, self.axis.parameter_placements(Replicate()))

    def _check_local(self, given: Arguments) -> None:
        if any(isinstance(t, DTensor) for t in given[1:]):
            raise InputError(
                "experts got plain tokens with distributed index, weights or counts", "distribute all of them, or none"
            )
        if self.summed:
            raise InputError(
                "experts got plain tokens, and their hidden features are sharded over "
                f"{self._name(min(self.summed))}: the placement of the tokens over that axis is not known",
                "pass tokens as a DTensor, e.g. DTensor.from_local(tokens, mesh, [Shard(0), Replicate()])",
            )

    def _name(self, index: int) -> str:
        return self.axis.mesh_info.names[index]

    def _placed(self, tokens: DTensor, given: Arguments) -> Placed:
        """Return the placements of the inputs and the output of a call."""
        features = tokens.dim() - 1
        rows: list[tuple[Placement, Placement, Placement]] = []
        for index, placement in enumerate(tokens.placements):
            if index in self.summed:
                rows.append((Replicate(), Partial(), Partial()))
            elif isinstance(placement, AnyShard) and placement.dim != features:
                rows.append((placement,) * 3)
            elif index != self.axis.index:
                rows.append((Replicate(),) * 3)
            elif isinstance(placement, Replicate) and not given.is_sorted and self._own_is_cheaper(given):
                rows.append((Replicate(), Partial(), Partial()))
            else:
                rows.append((Shard(0),) * 3)
        return Placed(*zip(*rows, strict=True))

    def _own_is_cheaper(self, given: Arguments) -> bool:
        """Return whether summing the outputs of all tokens moves less than sending a share of the tokens and gathering.

        Counted in tokens: a sum moves 2 per token; sending moves k / ranks each way, and the gather moves 1.
        """
        return 2 * given.chosen.shape[-1] >= self.experts.ranks


class Runner:
    """One call of experts in progress: tokens are sent when it is made, and results sent back by `finish`."""

    def __init__(
        self, call: ExpertCall, given: Arguments, placed: Placed | None, caller: DTensor | None, read_counts: bool
    ) -> None:
        self.call, self.placed, self.caller = call, placed, caller
        tokens, chosen, *weights = (self._local(t) for t in given if t is not None)
        self.shape = tokens.shape
        self.weights = weights[0].flatten(0, -2) if weights else None
        self.choices = 1 if given.is_sorted else chosen.shape[-1]
        self.is_sorted = given.is_sorted
        self.read_counts = read_counts
        self.route = self._route(tokens, chosen)
        rows = tokens if given.is_sorted else tokens.flatten(0, -2)
        self.rows = to_experts(rows, self.route, self.choices)

    def _local(self, tensor: Tensor) -> Tensor:
        """Return the local tensor of an input."""
        if self.placed is None:
            return on_mesh(tensor, self.call.axis.mesh_info)
        if not isinstance(tensor, DTensor):
            raise InputError(
                f"experts got distributed tokens with a plain index, weights or counts of shape {list(tensor.shape)}",
                "distribute all of them like the tokens, e.g. distribute_tensor(index, mesh, tokens.placements)",
            )
        if self.caller is not None and tensor.dim() < self.caller.dim():  # counts of all ranks' rows
            return tensor.full_tensor()
        moved = tensor.redistribute(placements=self.placed.inputs)
        return moved.to_local(grad_placements=self.placed.gradients if tensor.is_floating_point() else None)

    def _route(self, tokens: Tensor, chosen: Tensor) -> TokenRoute:
        experts = self.call.experts
        with torch.no_grad():
            if self.is_sorted:
                counts = chosen if self.placed is None else self._local_counts(chosen)
                return route_sorted_rows(counts, tokens.shape[0], experts, read_counts=self.read_counts)
            replicated = self.placed is not None and self.placed.inputs[self.call.axis.index] == Replicate()
            route = own_rows if replicated and experts.ranks > 1 else route_rows
            return route(chosen.flatten(), experts, read_counts=self.read_counts)

    def _local_counts(self, counts: Tensor) -> Tensor:
        """Return the number of this rank's rows for each expert, from the numbers of all ranks' rows."""
        assert self.caller is not None
        assert self.placed is not None
        layout = self.caller._spec.with_placements(self.placed.inputs).layout

        def held(at: Coordinate, ends: Tensor) -> Tensor:
            return local_ends(ends, layout.runs(at)[0]).diff(prepend=ends.new_zeros(1))

        return on_ranks(self.call.axis.mesh_info, held)(counts.long().cumsum(0))

    @property
    def inner_arguments(self) -> tuple[object, ...]:
        """Return the arguments for the module's own code."""
        route = self.route
        if route.sizes is not None:
            return self.rows, route.sizes
        if self.is_sorted:
            return self.rows, route.counts
        index = _expert_of_rows(route)
        weights = self.rows.new_ones((self.rows.shape[0], 1))
        return self.rows, index.unsqueeze(1), weights

    def local_parameter(self, parameter: DTensor) -> Tensor:
        """Return the local experts, gathered over axes other than those of experts and hidden features.

        The parameter may be on a mesh with more axes than the style's, as data parallel wrappers make it.
        """
        mesh_info, style = parameter._spec.mesh_info, self.call.axis.mesh_info
        indices = [style.names.index(name) if name in style.names else None for name in mesh_info.names]
        kept = [p if self._keeps(i) else Replicate() for i, p in zip(indices, parameter.placements, strict=True)]
        gradients = [p if isinstance(p, AnyShard) else self._of_gradient(i) for i, p in zip(indices, kept, strict=True)]
        # Not redistributed if nothing moves: backward would reduce the Partial gradient at once.
        held = parameter if tuple(kept) == parameter.placements else parameter.redistribute(placements=kept)
        local = held.to_local(grad_placements=gradients)
        if self.call.mean and self.placed is None and local.requires_grad:
            ranks = mesh_info.mesh.size()
            local.register_hook(lambda gradient: gradient / ranks)
        experts = self.call.experts
        if experts.is_even or not isinstance(kept[indices.index(experts.index)], AnyShard):
            return local
        # The last ranks hold fewer experts, or none. All ranks run the same code, so they get extra ones without rows.
        return pad(local, [0, 0] * (local.dim() - 1) + [0, experts.most - local.shape[0]])

    def _keeps(self, index: int | None) -> bool:
        """Return whether parameters stay sharded over this axis of the style's mesh (None: an axis of another mesh)."""
        return index == self.call.axis.index or index in self.call.summed

    def _of_gradient(self, index: int | None) -> Placement:
        """Return the placement of a parameter's local gradients over an axis that does not shard it."""
        if index is None or index == self.call.axis.index or self.placed is None:
            return Partial()
        return Replicate() if self.placed.inputs[index] == Replicate() else Partial()

    def finish(self, output: Tensor) -> Tensor:
        """Send the module's results back, and return the output of the call."""
        rows = to_tokens(output, self.route)
        if not self.is_sorted:
            if self.weights is None:
                rows = rows.unflatten(0, (-1, self.choices)).sum(1)
            else:
                rows = weighted_sum(rows, self.weights)
            rows = rows.view(*self.shape[:-1], rows.shape[-1]) if len(self.shape) > 2 else rows
        if self.placed is None or self.caller is None:
            return rows
        shape = (*self.caller.shape[:-1], rows.shape[-1])
        result = DTensor.from_local(rows, self.call.axis.mesh, self.placed.outputs, shape=shape)
        wanted: Sequence[Placement] = self.caller.placements
        final = [p if isinstance(p, AnyShard) else Replicate() for p in wanted]
        return result.redistribute(placements=final)


def _expert_of_rows(route: TokenRoute) -> Tensor:
    """Return the local index of each row's expert."""

    def repeated(counts: Tensor, rows: int) -> Tensor:
        numbers = torch.arange(counts.shape[0], device=counts.device)
        return numbers.repeat_interleave(counts, output_size=rows)

    if isinstance(route.counts, RankTensor):
        return map_ranks(lambda _, *own: repeated(*own), route.counts, route.rows)
    return repeated(route.counts, route.rows)
