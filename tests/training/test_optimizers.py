"""Every optimizer of torch.optim, with the options of PyTorch's own database, takes the one-device steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from shardwise import Shard, explicit
from shardwise.debug import CommDebugMode
from tests.ops.helpers import on as on_mesh
from tests.ops.helpers import ranks
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


SILENT = [name for name in BY_NAME if name not in ("Adafactor", "LBFGS", "Muon")]  # those need norms and products


@pytest.mark.parametrize("name", SILENT)
def test_a_step_needs_no_communication(name: str) -> None:
    info = BY_NAME[name]
    with meshes() as on:
        step = goals(EVERY_KIND, torch.float64, on)[0]
        for way in ways(info):
            params = leaves(EVERY_KIND, values(EVERY_KIND, 0, torch.float64), on)
            optimizer = info.optim_cls(params, **way)
            for param, gradient in zip(params, step, strict=True):
                param.grad = gradient.clone()
            with CommDebugMode() as counts, explicit():
                optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
            assert counts.get_total_counts() == 0


@pytest.mark.parametrize("name", [name for name in BY_NAME if "differentiable" in BY_NAME[name].supported_impls])
def test_gradients_flow_through_a_step(name: str) -> None:
    def gradients(on: Any) -> list[Tensor]:
        start, slopes = (leaves(EVERY_KIND, values(EVERY_KIND, seed, torch.float64), on) for seed in (0, 1))
        params = [p * 1 for p in start]
        for param, slope in zip(params, slopes, strict=True):
            param.grad = slope * 1
        BY_NAME[name].optim_cls(params, differentiable=True).step()
        for param in params:
            param.square().sum().backward()
        return [whole_of(p.grad) for p in (*start, *slopes)]

    with meshes() as on:
        for many, one in zip(gradients(on), gradients(None), strict=True):
            torch.testing.assert_close(many, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    def make(params: Any) -> optim.Optimizer:
        return BY_NAME[name].optim_cls(params, lr=0.1, weight_decay=0.1, foreach=True)

    with meshes() as on:
        start = values(EVERY_KIND, 0, dtype)
        wanted = train(make, leaves(EVERY_KIND, start, None), goals(EVERY_KIND, dtype, None), False)
        found = train(make, leaves(EVERY_KIND, start, on), goals(EVERY_KIND, dtype, on), False)
        for one, many in zip(wanted, found, strict=True):
            torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-5)


def test_groups_of_parameters_and_schedules() -> None:
    def steps(on: Any) -> list[Tensor]:
        params = leaves(EVERY_KIND, values(EVERY_KIND, 0, torch.float64), on)
        groups = [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "weight_decay": 0.5}]
        optimizer = optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for step in goals(EVERY_KIND, torch.float64, on):
            for param, goal in zip(params, step, strict=True):
                param.grad = param.detach() - goal
            optimizer.step()
            schedule.step()
        return [whole_of(p) for p in params]

    with meshes() as on:
        for many, one in zip(steps(on), steps(None), strict=True):
            torch.testing.assert_close(many, one.detach())


def test_sparse_gradients_are_dense() -> None:
    rows = torch.tensor([[1, 2, 2], [7, 1, 0]])
    for kind in (nn.Embedding, nn.EmbeddingBag):
        one = kind(10, 4, sparse=True)
        one(rows).square().sum().backward()
        assert one.weight.grad is not None
        with ranks(2, 2) as mesh:
            many = kind(10, 4, sparse=True)
            many.weight = nn.Parameter(on_mesh(mesh, one.weight.detach(), Shard(0), Shard(1)))
            many(on_mesh(mesh, rows, Shard(0))).square().sum().backward()
            assert many.weight.grad.placements == (Shard(0), Shard(1))
            torch.testing.assert_close(whole_of(many.weight.grad), one.weight.grad.to_dense())
            with pytest.raises(RuntimeError, match="does not support dense gradients"):
                optim.SparseAdam(many.parameters()).step()
            optim.Adagrad(many.parameters()).step()
