"""Every optimizer of torch.optim, with the options of PyTorch's own database, takes the one-device steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from tests.training.parameters import EVERY_KIND, ONE_MESH, Kind, at_home, leaves, meshes, values, whole_of

STEPS = 5
TESTED = [info for info in optim_db if info.optim_cls is not optim.SparseAdam]
BY_NAME = {info.optim_cls.__name__: info for info in TESTED}


def ways(info: OptimizerInfo) -> Iterator[dict[str, Any]]:
    """How the step is carried out, of the ways that a CPU has."""
    if info.optim_cls is optim.LBFGS:
        yield {"max_iter": 4}
        return
    yield {}
    if "foreach" in info.supported_impls:
        yield {"foreach": True}
    if "cpu" in info.supports_fused_on:
        yield {"fused": True}
    if "cpu" in info.supports_fused_on and info.has_capturable_arg:
        yield {"fused": True, "capturable": True}


def kinds_for(info: OptimizerInfo) -> Sequence[Kind]:
    if info.optim_cls is optim.LBFGS:  # puts all parameters into one vector, so on one mesh
        return ONE_MESH
    if info.optim_cls is optim.Muon:
        return [kind for kind in EVERY_KIND if len(kind[0]) == 2]
    return EVERY_KIND


def goals(kinds: Sequence[Kind], dtype: torch.dtype, on: Any) -> list[list[Tensor]]:
    """What the parameters are drawn to, another for each step."""
    wholes = [values(kinds, 1 + step, dtype) for step in range(STEPS)]
    if on is None:
        return wholes
    return [[at_home(whole, home, on) for whole, (_, home) in zip(step, kinds, strict=True)] for step in wholes]


def train(make: Any, params: list[nn.Parameter], goals: list[list[Tensor]], closures: bool) -> list[Tensor]:
    """What the parameters and the optimizer's state are in the end; the loss is half the squared distance."""
    optimizer = make(params)
    for step in goals:

        def closure(step: list[Tensor] = step) -> float:
            for p, goal in zip(params, step, strict=True):
                p.grad = p.detach() - goal
            return sum(p.grad.square().sum().item() / 2 for p in params) if closures else 0.0

        closure()
        optimizer.step(closure if closures else None)
    state = [optimizer.state[p].get(name) for p in params for name in sorted(optimizer.state[p])]
    return [whole_of(t) for t in (*params, *state) if isinstance(t, Tensor)]


def close(info: OptimizerInfo, options: dict[str, Any]) -> dict[str, float]:
    if info.optim_cls is optim.Muon:  # computes in bfloat16, whatever the parameters are
        return {"rtol": 0.0, "atol": 0.05 * STEPS * float(options.get("lr", 1e-3))}
    return {"rtol": 1e-7, "atol": 1e-9}


@pytest.mark.parametrize("name", BY_NAME)
def test_steps_are_those_of_one_device(name: str) -> None:
    info = BY_NAME[name]
    kinds = kinds_for(info)
    start, plain_goals = values(kinds, 0, torch.float64), goals(kinds, torch.float64, None)
    with meshes() as on:
        cut_goals = goals(kinds, torch.float64, on)
        for given in info.optim_inputs_func(device="cpu"):
            for way in ways(info):
                options = {**given.kwargs, **way}

                def make(params: Any, options: Any = options) -> optim.Optimizer:
                    return info.optim_cls(params, **options)

                wanted = train(make, leaves(kinds, start, None), plain_goals, info.step_requires_closure)
                found = train(make, leaves(kinds, start, on), cut_goals, info.step_requires_closure)
                assert len(found) == len(wanted)
                for one, many in zip(wanted, found, strict=True):
                    say = f"{given.desc}, {way or 'one by one'}: "
                    torch.testing.assert_close(many, one, **close(info, options), msg=lambda text, say=say: say + text)
