"""Experts that are sharded over an axis, with tokens that travel to them, follow one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise import (
    DeviceMesh,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from shardwise.experimental import implicit_replication
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.parallel.expert_checks import (
    FEATURES,
    assert_same,
    by_name,
    loss_of,
    made,
    on_ranks,
    parallel,
    whole,
)
from tests.parallel.mixtures import KINDS, ChosenExperts, ListedExperts
from tests.worlds import mesh_of


def follows_one_device(
    kind: str, mesh: DeviceMesh, placements: list[Placement], style: ExpertParallel | None = None, **sizes: int
) -> None:
    x = torch.randn(29, 8, generator=torch.Generator().manual_seed(1))
    alone, given = made(kind, **sizes), x.clone().requires_grad_()
    expected = alone(given)
    loss_of(expected).backward()
    model = parallel(made(kind, **sizes), mesh, style)
    tokens = distribute_tensor(x, mesh, placements).requires_grad_()
    found = model(tokens)
    assert found[0].placements == tokens.placements
    loss_of(found).backward()
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(mine), one.detach())
    torch.testing.assert_close(whole(tokens.grad), given.grad)
    assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements


# ---- distributed tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [8, 6, 3])
@pytest.mark.parametrize("tokens", [Shard(0), Replicate(), Shard(1)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_axis(kind: str, tokens: Placement, experts: int) -> None:
    with mesh_of(4, names=("ep",)) as mesh:
        follows_one_device(kind, mesh, [tokens], experts=experts)


@pytest.mark.parametrize("choices", [1, 2])
def test_replicated_tokens_with_few_choices_are_shared_out(choices: int) -> None:
    with mesh_of(8, names=("ep",)) as mesh:
        follows_one_device("chosen", mesh, [Replicate()], choices=choices)


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize(
    "tokens", [(0, 0, None), (0, 0, 0), (None, 0, None), (0, None, None), (None, None, 1)], ids=str
)
@pytest.mark.parametrize("kind", ["sorted", "chosen"])
def test_three_axes(kind: str, tokens: tuple[int | None, ...], features: bool) -> None:
    """Tokens sharded over dp, ep and tp or not; the hidden features of the experts sharded over tp or not."""
    style = ExpertParallel(features=FEATURES) if features else None
    with mesh_of(2, 2, 2, names=("dp", "ep", "tp")) as mesh:
        follows_one_device(kind, mesh, [Replicate() if p is None else Shard(p) for p in tokens], style, experts=6)


def test_the_axis_of_data_parallelism() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        follows_one_device("chosen", mesh, [Shard(0), Replicate()], ExpertParallel().over("dp"))


def test_experts_that_are_sharded_over_other_axes_are_gathered_there() -> None:
    x = torch.randn(12, 8)
    alone = made("chosen")
    expected = alone(x)
    loss_of(expected).backward()
    with mesh_of(2, 2, names=("dp", "ep")) as mesh:
        model = made("chosen")
        for name, parameter in list(model.experts.named_parameters()):
            setattr(
                model.experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(1), Replicate()]))
            )
        parallel(model, mesh)
        assert model.experts.w1.placements == (Shard(1), Shard(0))
        found = model(distribute_tensor(x, mesh, [Shard(0), Shard(0)]))
        loss_of(found).backward()
        torch.testing.assert_close(whole(found[0]), expected[0].detach())
        assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))


def test_leading_dims_may_be_sharded() -> None:
    x, weights = torch.randn(4, 6, 8), torch.rand(4, 6, 2)
    index = torch.rand(4, 6, 8).topk(2).indices
    torch.manual_seed(0)
    alone = ChosenExperts(8, 8, 16)
    expected = alone(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1)).view(4, 6, 8)
    with mesh_of(2, 2, names=("dp", "ep")) as mesh:
        model = parallelize_module(copy.deepcopy(alone), mesh, ExpertParallel())
        found = model(*(distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for t in (x, index, weights)))
        torch.testing.assert_close(whole(found), expected.detach())


# ---- plain tokens ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(["any", "one expert", "the last expert"]),
    st.sampled_from(["sorted", "chosen", "list"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_any_number_of_tokens(
    tokens: list[int], experts: int, choices: int, chosen: str, kind: str, random: Any
) -> None:
    """Each rank has tokens of its own, perhaps none; experts may all be chosen, or one by all tokens."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    if chosen != "any":
        choices = 1
    choices = min(choices, experts)
    x = [torch.randn(n, 8, generator=generator) for n in tokens]
    scores = [torch.rand(n, experts, generator=generator) for n in tokens]
    for own in scores:
        if chosen != "any":
            own[:, 0 if chosen == "one expert" else -1] = 2.0
    top = [own.topk(choices) for own in scores]
    index, weights = [t.indices for t in top], [t.values for t in top]
    torch.manual_seed(0)
    alone = KINDS["chosen" if kind == "sorted" else kind](experts, 8, 16)
    inputs = torch.cat(x).requires_grad_(), torch.cat(index), torch.cat(weights).requires_grad_()
    expected = alone(*inputs)
    expected.square().sum().backward()
    with mesh_of(4, names=("ep",)) as mesh:
        torch.manual_seed(0)
        model = parallelize_module(KINDS[kind](experts, 8, 16), mesh, ExpertParallel())
        mine, its_weights = on_ranks(x, grad=True), on_ranks(weights, grad=True)
        if kind == "sorted":
            order = [own.flatten().argsort(stable=True) for own in index]
            counts = [torch.bincount(own.flatten(), minlength=experts) for own in index]
            rows = mine[on_ranks([o // choices for o in order])]
            rows = model(rows, on_ranks(counts))[on_ranks([o.argsort() for o in order])]
            found = (rows.unflatten(0, (-1, choices)) * its_weights.unsqueeze(-1)).sum(1)
        else:
            found = model(mine, on_ranks(index), its_weights)
        found.square().sum().backward()
        torch.testing.assert_close(torch.cat(found.shards), expected.detach())
        torch.testing.assert_close(torch.cat(mine.grad.shards), inputs[0].grad)
        torch.testing.assert_close(torch.cat(its_weights.grad.shards), inputs[2].grad)
        assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_gradients_with_the_convention_of_data_parallel_training(sizes: tuple[int, ...]) -> None:
    """Each rank's loss is a mean over its own tokens, and gradients are averaged over ranks, those of experts too."""
    x = torch.randn(4, 6, 8)
    alone = made("chosen")
    for own in x:
        (loss_of(alone(own)) / 4).backward()
    with mesh_of(*sizes, names=("ep", "dp")) as mesh:
        model = made("chosen")
        parallelize_module(model, mesh, {"experts": ExpertParallel(gradient_reduction="mean")})
        model.router.weight = nn.Parameter(on_ranks([model.router.weight.detach()] * 4))
        loss_of(model(on_ranks(list(x)))).backward()
        router = torch.stack(model.router.weight.grad.shards).mean(0)  # as DistributedDataParallel does
        torch.testing.assert_close(router, alone.router.weight.grad)
        for name, parameter in model.experts.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), alone.experts.get_parameter(name).grad)


def test_one_plain_tensor_is_that_of_each_simulated_rank() -> None:
    x, index, weights = torch.randn(6, 8), torch.rand(6, 8).topk(2).indices, torch.rand(6, 2)
    torch.manual_seed(0)
    alone = ChosenExperts(8, 8, 16)
    with mesh_of(2, names=("ep",)) as mesh:
        found = parallelize_module(copy.deepcopy(alone), mesh, ExpertParallel())(x, index, weights)
        for own in found.shards:
            torch.testing.assert_close(own, alone(x, index, weights).detach())


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    alone, x = ListedExperts(4, 8, 16), torch.randn(6, 8)
    index, weights = torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)

    def twice(experts: nn.Module, *inputs: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(experts(*inputs).pow(3).sum(), inputs[0], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), inputs[0])
        return second

    expected = twice(alone, x.clone().requires_grad_(), index, weights)
    with mesh_of(2, names=("ep",)) as mesh:
        model = parallelize_module(copy.deepcopy(alone), mesh, ExpertParallel())
        halves = [on_ranks(list(t.split(3))) for t in (index, weights)]
        found = twice(model, on_ranks(list(x.split(3)), grad=True), *halves)
        torch.testing.assert_close(torch.cat(found.shards), expected)


def test_plain_tokens_are_replicated_inside_implicit_replication() -> None:
    alone, x = made("chosen"), torch.randn(5, 8)
    expected = alone(x)[0].detach()
    with mesh_of(2, 2, names=("dp", "ep")) as mesh, implicit_replication():
        model = parallelize_module(made("chosen"), mesh, {"experts": ExpertParallel()})
        torch.testing.assert_close(whole(model(x)[0]), expected)
