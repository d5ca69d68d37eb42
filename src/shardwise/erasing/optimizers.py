"""Optimizer steps in a recording.

What an optimizer computes depends on numbers that change between steps: learning rates, step counts. So a recording
does not contain its ops, but a call of the optimizer. If the optimizer updates each element separately, as most do, a
twin of it runs on the local shards: plain tensors that share memory with the parameters and the state of the user's
optimizer, with the present options of its param_groups. Other optimizers, and those with hooks, run on the distributed
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import TypeVar

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._torch.optim import has_step_hooks
from ..errors import EraseError
from ..sharding.base import DTensorBase
from ..sharding.recording import recorder as active_recorder
from ..sharding.source_lines import users_line
from ..sharding.spec import DTensorSpec
from .recorder import OpRecorder, local_of, spec_of

T = TypeVar("T")

_BY_ELEMENT = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
}
"""Optimizers that update each element of a parameter only from that element of its gradient and state."""


class OptimizerStep:
    """A step of one optimizer, with the gradients of these parameters."""

    def __init__(self, optimizer: optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self.optimizer, self.parameters = optimizer, list(parameters)
        self.grad_specs = [spec_of(parameter.grad) for parameter in parameters]
        self.__name__ = f"{type(optimizer).__name__}_step"
        self._members = [tuple(group["params"]) for group in optimizer.param_groups]
        self._twin: _Twin | None = None

    def unchanged(self) -> bool:
        """Return whether the optimizer still has the same parameters."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._members) and all(
            len(group["params"]) == len(members) and all(map(is_, group["params"], members))
            for group, members in zip(groups, self._members, strict=True)
        )

    def describe(self) -> str:
        """Return how the step is run, as text."""
        where = "on local shards" if self._twin is not None else "as written"
        return f"{type(self.optimizer).__name__} of {len(self.parameters)} parameters, {where} in the last replay"

    def __call__(self, grads: list[Tensor]) -> None:
        """Make a step with these local gradients."""
        twin = self._twin
        if twin is None or not twin.is_current():
            twin = self._twin = self._new_twin()
        if twin is not None:
            twin.step(grads)
            return
        for parameter, grad, spec in zip(self.parameters, grads, self.grad_specs, strict=True):
            parameter.grad = grad if spec is None else DTensorBase.concrete.wrap(grad, spec)
        with torch.enable_grad():
            self.optimizer.step()
        for parameter in self.parameters:  # gradients that the step leaves are set at the end of the replay
            parameter.grad = None

    def _new_twin(self) -> _Twin | None:
        optimizer = self.optimizer
        if type(optimizer) not in _BY_ELEMENT or has_step_hooks(optimizer):
            return None
        states = [optimizer.state.get(parameter) for parameter in self.parameters]
        if any(not isinstance(v, Tensor) and v is not None for state in states if state for v in state.values()):
            return None
        if not all(map(_fits, self.parameters, self.grad_specs)):
            return None
        needs_state = not isinstance(optimizer, optim.SGD) or any(g["momentum"] for g in optimizer.param_groups)
        return None if needs_state and not all(states) else _Twin(optimizer, self.parameters)


class _Twin:
    """A copy of an optimizer that works on local shards."""

    def __init__(self, optimizer: optim.Optimizer, parameters: list[Tensor]) -> None:
        self._original, self._parameters = optimizer, parameters
        self._locals = [torch.nn.Parameter(local_of(p), requires_grad=p.requires_grad) for p in parameters]
        twin_of = {id(p): local for p, local in zip(parameters, self._locals, strict=True)}
        self._groups = []
        for group in optimizer.param_groups:
            members = [twin_of[id(p)] for p in group["params"] if id(p) in twin_of]
            self._groups.append({**group, "params": members})
        self._state = optimizer.state
        self._seen = self._values()
        twin = object.__new__(type(optimizer))
        twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})  # schedulers wrap `step`
        twin.param_groups = self._groups
        twin.state = defaultdict(dict)
        for parameter, local in zip(parameters, self._locals, strict=True):
            found = optimizer.state.get(parameter, {})
            twin.state[local] = {name: local_of(value) for name, value in found.items()}
        self._twin = twin

    def _values(self) -> list[object]:
        """Return the tensors of the optimizer's state, and the local shards of its parameters."""
        state = self._original.state
        values = [value for p in self._parameters for value in state.get(p, {}).values()]
        return [*values, *map(local_of, self._parameters)]

    def is_current(self) -> bool:
        """Return whether the optimizer's state and parameters are still the same tensors."""
        if self._original.state is not self._state:
            return False
        values = self._values()
        return len(values) == len(self._seen) and all(map(is_, values, self._seen))

    def step(self, grads: list[Tensor]) -> None:
        """Update parameters and state."""
        for group, original in zip(self._groups, self._original.param_groups, strict=True):
            for name, value in original.items():
                if name != "params":
                    group[name] = value
        for local, grad in zip(self._locals, grads, strict=True):
            local.grad = grad
        self._twin.step()
        for local in self._locals:
            local.grad = None


@contextmanager
def watching_zero_grad(before: dict[int, tuple[Tensor, Tensor | None]], dropped: set[int]) -> Iterator[None]:
    """Add to `dropped`, inside the block, the ids of leaves whose earlier gradients `zero_grad` drops.

    `before` holds the gradients at the start of the step. Those of such leaves need no guard.
    """

    def watched(
        original: Callable[[T, bool], None], parameters: Callable[[T], Iterable[Tensor]]
    ) -> Callable[..., None]:
        def zero_grad(owner: T, set_to_none: bool = True) -> None:
            for parameter in parameters(owner) if set_to_none else ():
                if parameter.grad is before.get(id(parameter), (None, None))[1]:
                    dropped.add(id(parameter))
            original(owner, set_to_none)

        return zero_grad

    of_optimizer, of_module = optim.Optimizer.zero_grad, nn.Module.zero_grad
    optim.Optimizer.zero_grad = watched(of_optimizer, parameters_of)  # type: ignore[method-assign]
    nn.Module.zero_grad = watched(of_module, nn.Module.parameters)  # type: ignore[method-assign]
    try:
        yield
    finally:
        optim.Optimizer.zero_grad = of_optimizer  # type: ignore[method-assign]
        nn.Module.zero_grad = of_module  # type: ignore[method-assign]


def parameters_of(optimizer: optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def recording_optimizers(recorder: OpRecorder, steps: list[OptimizerStep]) -> Iterator[None]:
    """Record optimizer steps inside the block as calls of the optimizer."""
    depth = [0]

    def before(optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if active_recorder.get() is not recorder:
            return
        depth[0] += 1
        if depth[0] > 1:
            return
        if args[1:] or kwargs.get("closure") is not None:
            raise EraseError(
                f"{users_line()}: {type(optimizer).__name__}.step(closure) runs the model inside the optimizer",
                "erase the closure, and call the optimizer outside",
            )
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        step = OptimizerStep(optimizer, parameters)
        recorder.step(step, [local_of(parameter.grad) for parameter in parameters])
        steps.append(step)
        recorder.paused += 1

    def after(optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if active_recorder.get() is not recorder or not depth[0]:
            return
        depth[0] -= 1
        if not depth[0]:
            recorder.paused -= 1

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if depth[0]:
            recorder.paused -= 1


def _fits(parameter: Tensor, grad_spec: DTensorSpec | None) -> bool:
    """Return whether a gradient is sharded like its parameter."""
    if not isinstance(parameter, DTensorBase):
        return grad_spec is None
    return grad_spec is not None and grad_spec.layout is parameter._spec.cotangent().layout
