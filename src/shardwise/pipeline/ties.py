"""Parameters that several stages share: an embedding in the first stage, and the output head in the last.

Each stage has a copy on its own mesh, with its own placements. Copies are equal at first, and get the same gradient,
the sum over the stages; so an optimizer that works element by element keeps them equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .._torch.modules import parameters_of
from ..errors import InputError
from ..tensor.dtensor import DTensor
from .schedule import Action

if TYPE_CHECKING:
    from .transfer import Courier, Mailbox

__all__ = ["Ties", "separate", "ties_between"]


class Place(NamedTuple):
    """A stage that has a shared parameter, and the name of the parameter there."""

    stage: int
    name: str


def ties_between(stages: Sequence[nn.Module]) -> list[list[Place]]:
    """Return the parameters that several stages share, each with its places, in the order of the stages."""
    places: dict[int, dict[int, Place]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                places.setdefault(id(parameter), {}).setdefault(index, Place(index, name))
    return [list(found.values()) for found in places.values() if len(found) > 1]


def separate(stages: Sequence[nn.Module], ties: list[list[Place]]) -> None:
    """Give each stage its own copy of the parameters that it shares, since stages are on different meshes."""
    for first, *others in ties:
        shared = stages[first.stage].get_parameter(first.name)
        for place in others:
            copied = nn.Parameter(shared.detach().clone(), shared.requires_grad)
            for module in stages[place.stage].modules():
                for name, parameter in parameters_of(module).items():
                    if parameter is shared:
                        parameters_of(module)[name] = copied


class Ties:
    """The shared parameters of a pipeline, and the sum of their gradients."""

    def __init__(
        self, ties: list[list[Place]], stage_named: Callable[[int], nn.Module | None], courier: Courier | Mailbox
    ) -> None:
        self.ties, self.stage_named, self.courier = ties, stage_named, courier
        self._earlier: dict[Place, Tensor | None] = {}

    def copies(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this process that are copies of an earlier stage's."""
        for tie in self.ties:
            for place in tie[1:]:
                parameter = self._parameter(place)
                if parameter is not None:
                    yield parameter

    def begin(self) -> None:
        """Set aside gradients of earlier steps, which are summed already."""
        for place, parameter in self._copies_here():
            self._earlier[place], parameter.grad = parameter.grad, None

    def sum_gradients(self, first_number: int) -> None:
        """Set the gradient of each copy to the sum over all copies, plus the gradients set aside.

        Messages carry the number of a microbatch. `first_number` is the first one that is not in use.
        """
        for index, tie in enumerate(self.ties):
            own = {place: parameter for place, parameter in self._copies_here() if place in tie}
            if not own:
                continue
            shares = {(to, to): _gradient(parameter) for to, parameter in own.items()}
            for one, other in itertools.combinations(tie, 2):
                self._exchange(one, other, own, shares, first_number + index)
            for place, parameter in own.items():
                parameter.grad = _sum([shares[place, source] for source in tie], self._earlier.get(place))
        self._earlier.clear()

    def _exchange(
        self,
        one: Place,
        other: Place,
        own: dict[Place, nn.Parameter],
        shares: dict[tuple[Place, Place], Tensor],
        number: int,
    ) -> None:
        """Exchange the gradients of two copies, so that `shares[target, source]` is the one of `source` at `target`."""
        for source, target in ((one, other), (other, one)):
            action, key = Action(True, target.stage, number), ("tied", source, target)
            across = source.stage - target.stage
            if source in own and target in own and not self.courier.crosses(source.stage, target.stage):
                shares[target, source] = shares[source, source]
            else:
                if source in own:
                    self.courier.send(action, shares[source, source], key, across)
                if target in own:
                    shares[target, source] = self.courier.receive(action, key, across)
            if target in own:
                shares[target, source] = _placed_as(own[target], shares[target, source])

    def _copies_here(self) -> Iterator[tuple[Place, nn.Parameter]]:
        for place in itertools.chain(*self.ties):
            parameter = self._parameter(place)
            if parameter is not None:
                yield place, parameter

    def _parameter(self, place: Place) -> nn.Parameter | None:
        stage = self.stage_named(place.stage)
        if stage is None:
            return None
        found = dict(stage.named_parameters(remove_duplicate=False)).get(place.name)
        if found is None:
            raise InputError(
                f"stage {place.stage} shared its parameter {place.name!r} with another stage, and has no parameter of "
                "this name any more",
                "let `parallelize` keep the names of parameters that stages share",
            )
        return found


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).detach() if parameter.grad is None else parameter.grad


def _placed_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of another stage's copy with the placements of this one."""
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        raise InputError(
            f"stages share a parameter of shape {list(parameter.shape)} that is a DTensor in one of them and plain in "
            "another",
            "distribute it in both: distribute_module(stage, mesh)",
        )
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


@torch.no_grad()
def _sum(gradients: Sequence[Tensor], earlier: Tensor | None) -> Tensor:
    """Return the sum in the order of the stages, so that it is bitwise equal for all copies."""
    total = gradients[0] + gradients[1]
    for gradient in gradients[2:]:
        total = total + gradient
    return total if earlier is None else total + earlier
