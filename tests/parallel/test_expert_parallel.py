"""Experts that are sharded over an axis, with tokens that travel to them, follow one device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from shardwise import (
    DeviceMesh,
    DTensor,
    InterleavedShard,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    shard_parameters,
)
from shardwise.comm import token_route
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError
from shardwise.experimental import implicit_replication
from shardwise.parallel import ExpertParallel, parallelize_module
from shardwise.world import RankTensor
from tests.parallel.mixtures import KINDS, ChosenExperts, Expert, ListedExperts, Mixture, SortedExperts
from tests.processes.pool import on_processes
from tests.worlds import Recorder, mesh_of

FEATURES = {"w1": Shard(1), "w3": Shard(1), "w2": Shard(2)}


def made(kind: str, **sizes: int) -> Mixture:
    torch.manual_seed(0)
    return Mixture(kind, **sizes)


def loss_of(outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    out, balance, z = outputs
    return out.square().mean() + 0.1 * balance + 0.01 * z


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.shards[0] if isinstance(tensor, RankTensor) else tensor


def by_name(model: nn.Module, value: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A value for each parameter, those of stacked lists under the names of the list."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        before, stacked, after = name.partition("stacked.")
        if stacked:
            found |= {f"{before}{index}.{after}": own for index, own in enumerate(value(parameter))}
        else:
            found[name] = value(parameter)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def parallel(model: Mixture, mesh: DeviceMesh, style: ExpertParallel | None = None) -> Mixture:
    """The mixture with its experts sharded and its router replicated."""
    parallelize_module(model, mesh, {"experts": style or ExpertParallel()})
    distribute_module(model, mesh)
    return model


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


def on_ranks(tensors: list[Tensor], grad: bool = False) -> RankTensor:
    return RankTensor(tensors, requires_grad=grad)


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


# ---- communication --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chosen", "list"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_collectives_and_host_reads(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, tokens and results travel once; sizes are read once; backward sends over the same route."""
    reads = Counter[str]()
    read_sizes = token_route.read_sizes
    monkeypatch.setattr(token_route, "read_sizes", lambda sizes: reads.update(["read"]) or read_sizes(sizes))
    torch.manual_seed(0)
    with mesh_of(ranks, names=("ep",)) as mesh:
        model = parallelize_module(KINDS[kind](8, 8, 16), mesh, ExpertParallel())
        x = on_ranks([torch.randn(n + 1, 8) for n in range(ranks)], grad=True)
        index = on_ranks([torch.rand(n + 1, 8).topk(2).indices for n in range(ranks)])
        weights = on_ranks([torch.rand(n + 1, 2) for n in range(ranks)], grad=True)
        with Recorder() as forward, HostReads() as others:
            out = model(x, index, weights)
        # On one rank nothing moves, and sizes are read only if the code of the experts needs them.
        assert [n for n in forward.names if n != "wait_tensor"] == (["all_to_all_single"] * 3 if ranks > 1 else [])
        assert reads["read"] == (1 if ranks > 1 or kind == "list" else 0)
        assert not others.found
        with Recorder() as backward:
            out.sum().backward()
        assert [n for n in backward.names if n != "wait_tensor"] == (["all_to_all_single"] * 2 if ranks > 1 else [])
        assert reads["read"] <= 1


class HostReads(Recorder):
    """Records the ops that read values of tensors on the host, or whose result shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func._schema.name, kwargs or {}
        reading = ("_local_scalar_dense", "nonzero", "_unique2", "bincount", "masked_select", "equal")
        sized = "repeat_interleave" in name and named.get("output_size") is None
        if name.removeprefix("aten::") in reading or sized:
            self.found.append(name)
        return func(*args, **named)


@pytest.mark.parametrize("tokens", [0, 12])
def test_only_routed_rows_are_sent(tokens: int) -> None:
    """All-to-alls carry one row for each chosen expert, of which those of a rank's own experts stay."""
    torch.manual_seed(0)
    with mesh_of(4, names=("ep",)) as mesh:
        model = parallelize_module(ChosenExperts(8, 8, 16), mesh, ExpertParallel())
        index = on_ranks([torch.rand(tokens, 8).topk(2).indices for _ in range(4)])
        with Sizes() as sizes:
            model(on_ranks([torch.randn(tokens, 8)] * 4), index, on_ranks([torch.rand(tokens, 2)] * 4))
        assert sizes.rows == [8 * 4, 2 * tokens * 4, 2 * tokens * 4]  # counts of 8 experts, rows, rows back


class Sizes(Recorder):
    """Records how many rows all ranks together put into each all-to-all."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "_c10d_functional::all_to_all_single":
            self.rows.append(sum(shard.shape[0] for shard in args[0].shards))
        return func(*args, **(kwargs or {}))


# ---- modules --------------------------------------------------------------------------------------------------------


def test_a_list_keeps_its_state_dict_and_a_share_of_the_parameters() -> None:
    torch.manual_seed(0)
    alone = ListedExperts(8, 8, 16)
    with mesh_of(4, names=("ep",)) as mesh:
        model = parallelize_module(copy.deepcopy(alone), mesh, ExpertParallel())
        assert len(model) == 8
        held = sum(p.to_local().shards[0].numel() for p in model.parameters())
        assert held == sum(p.numel() for p in alone.parameters()) // 4
        state = model.state_dict()
        assert list(state) == list(alone.state_dict())
        assert sum(v.to_local().shards[0].numel() for v in state.values()) == held
        assert_same({k: whole(v) for k, v in state.items()}, alone.state_dict())
        torch.manual_seed(1)
        other = parallelize_module(ListedExperts(8, 8, 16), mesh, ExpertParallel())
        other.load_state_dict(state)
        assert_same({k: whole(v) for k, v in other.state_dict().items()}, alone.state_dict())
        missing = dict(state)
        del missing["3.up.bias"]
        with pytest.raises(RuntimeError, match=r"up\.bias"):
            other.load_state_dict(missing)


def test_a_copy_of_a_module_routes_its_own_tokens() -> None:
    x, index, weights = torch.randn(6, 8), torch.rand(6, 8).topk(2).indices, torch.rand(6, 2)
    with mesh_of(2, names=("ep",)) as mesh:
        for kind in ("chosen", "list"):
            model = parallelize_module(KINDS[kind](8, 8, 16), mesh, ExpertParallel())
            twin = copy.deepcopy(model)
            given = [on_ranks(list(t.split(3))) for t in (x, index, weights)]
            torch.testing.assert_close(torch.cat(twin(*given).shards), torch.cat(model(*given).shards))


def test_parameters_come_back_after_an_error() -> None:
    with mesh_of(2, names=("ep",)) as mesh:
        model = parallelize_module(ChosenExperts(8, 8, 16), mesh, ExpertParallel())
        index, weights = on_ranks([torch.zeros(3, 2, dtype=torch.long)] * 2), on_ranks([torch.rand(3, 2)] * 2)
        with pytest.raises(RuntimeError):
            model(on_ranks([torch.randn(3, 7)] * 2), index, weights)
        assert isinstance(model.w1, DTensor)
        assert model.num_experts == 8


def test_activation_checkpointing() -> None:
    alone, x = made("chosen"), torch.randn(12, 8)
    loss_of(alone(x)).backward()
    with mesh_of(2, names=("ep",)) as mesh:
        model = parallel(made("chosen"), mesh)
        tokens = distribute_tensor(x, mesh, [Shard(0)])
        loss_of(torch.utils.checkpoint.checkpoint(model, tokens, use_reentrant=False)).backward()
        assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))


@pytest.mark.parametrize("kind", ["chosen", "list"])
def test_modules_without_data(kind: str) -> None:
    """Made on the meta device, sharded, and filled from a state dict."""
    alone = made(kind)
    with torch.device("meta"):
        model = Mixture(kind)
    with mesh_of(2, names=("ep",)) as mesh:
        parallel(model, mesh).to_empty(device="cpu")
        state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in alone.state_dict().items()}
        model.load_state_dict(state)
        assert_same(by_name(model, whole), by_name(alone, lambda p: p.detach()))


def test_state_dicts_of_checkpoints() -> None:
    alone = made("list")
    with mesh_of(2, names=("ep",)) as mesh:
        model = parallel(made("list"), mesh)
        state = get_model_state_dict(model)
        assert_same({name: whole(value) for name, value in state.items()}, alone.state_dict())
        set_model_state_dict(model, {name: value * 2 for name, value in state.items()})
        assert_same(by_name(model, whole), by_name(alone, lambda p: p.detach() * 2))


def test_packed_features() -> None:
    """A gate and an up projection in one weight, sharded in two blocks."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Parameter(torch.randn(4, 32, 8)), nn.Parameter(torch.randn(4, 8, 16))

        def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
            ends = counts.cumsum(0).int()
            gate, up = nn.functional.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            return nn.functional.grouped_mm(torch.sigmoid(gate) * up, self.down.transpose(1, 2), offs=ends)

    torch.manual_seed(0)
    alone, rows, counts = Packed(), torch.randn(12, 8), torch.tensor([5, 0, 3, 4])
    expected = alone(rows, counts)
    with mesh_of(2, 2, names=("ep", "tp")) as mesh:
        style = ExpertParallel(features={"gate_up": InterleavedShard(1, 2), "down": Shard(2)})
        model = parallelize_module(copy.deepcopy(alone), mesh, style)
        found = model(
            distribute_tensor(rows, mesh, [Shard(0), Replicate()]),
            distribute_tensor(counts, mesh, [Replicate(), Replicate()]),
        )
        torch.testing.assert_close(whole(found), expected.detach())


class Several(SortedExperts):
    def forward(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(rows, counts), counts


ERRORS: dict[str, tuple[Callable[[DeviceMesh], object], str]] = {
    "no experts": (
        lambda mesh: parallelize_module(nn.Linear(4, 4), mesh, ExpertParallel()),
        "the number of experts is the first dim of its 3-D parameters",
    ),
    "different experts": (
        lambda mesh: parallelize_module(nn.ModuleList([Expert(4, 8), Expert(4, 6)]), mesh, ExpertParallel()),
        "expert 1 is a Expert with other parameters than expert 0",
    ),
    "a reduction": (lambda mesh: ExpertParallel(gradient_reduction="max"), "use 'sum' or 'mean'"),
    "features of some": (
        lambda mesh: parallelize_module(
            SortedExperts(4, 8, 8), mesh, ExpertParallel(features={"w1": Shard(1)}, features_axis="ep")
        ),
        "the experts also have 'w2'",
    ),
    "an index out of range": (
        lambda mesh: parallelize_module(ChosenExperts(4, 8, 8), mesh, ExpertParallel())(
            *(on_ranks([t] * 2) for t in (torch.randn(2, 8), torch.tensor([[4], [0]]), torch.rand(2, 1)))
        ),
        "of 2 routed rows only 1 have an expert: an index is not one of 0 to 3",
    ),
    "a negative index": (
        lambda mesh: parallelize_module(ChosenExperts(4, 8, 8), mesh, ExpertParallel())(
            *(on_ranks([t] * 2) for t in (torch.randn(2, 8), torch.tensor([[-1], [0]]), torch.rand(2, 1)))
        ),
        "of 2 routed rows only 1 have an expert",
    ),
    "a mixture of plain and distributed": (
        lambda mesh: parallelize_module(ChosenExperts(4, 8, 8), mesh, ExpertParallel())(
            distribute_tensor(torch.randn(2, 8), mesh, [Shard(0)]), torch.tensor([[1], [0]]), torch.rand(2, 1)
        ),
        "distributed tokens with a plain index",
    ),
    "several outputs": (
        lambda mesh: parallelize_module(Several(4, 8, 8), mesh, ExpertParallel())(
            on_ranks([torch.randn(4, 8)] * 2), on_ranks([torch.ones(4, dtype=torch.long)] * 2)
        ),
        "experts returned a tuple",
    ),
    "one argument": (
        lambda mesh: parallelize_module(ChosenExperts(4, 8, 8), mesh, ExpertParallel())(torch.randn(2, 8)),
        r"call experts as experts\(tokens, index, weights\) or experts\(rows, counts\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, message = ERRORS[case]
    with mesh_of(2, names=("ep",)) as mesh, pytest.raises(InputError, match=message):
        call(mesh)


# ---- training -------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Two mixtures with residual connections, between two linears."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.mixtures = nn.ModuleList(Mixture(kind) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, extra = self.first(x), 0.0
        for mixture in self.mixtures:
            out, balance, z = mixture(x)
            x, extra = x + out, extra + 0.05 * balance + 0.01 * z
        return self.last(x), extra


def batch(step: int) -> tuple[Tensor, Tensor]:
    """29 tokens: ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(29, 8, generator=generator), torch.randn(29, 4, generator=generator)


def trained(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[float]:
    """Eight steps of AdamW with clipping; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(8):
        x, target = map(place, batch(step))
        out, extra = model(x)
        loss = nn.functional.mse_loss(out, target) + extra
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(whole(loss)))
    return losses


def network(kind: str) -> Network:
    torch.manual_seed(0)
    return Network(kind)


def training_follows_one_device(kind: str, mesh: DeviceMesh) -> None:
    alone, model = network(kind), network(kind)
    expected = trained(alone, lambda t: t)
    parallelize_module(model, mesh, {"mixtures.*.experts": ExpertParallel()})
    distribute_module(model, mesh)
    found = trained(model, lambda t: distribute_tensor(t, mesh, [Shard(0)] * mesh.ndim))
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0]
    assert_same(by_name(model, whole), by_name(alone, lambda p: p.detach()), 1e-4)


@pytest.mark.parametrize("kind", ["chosen", "list"])
def test_training(kind: str) -> None:
    with mesh_of(2, 4, names=("dp", "ep")) as mesh:
        training_follows_one_device(kind, mesh)


@on_processes
def test_training_on_processes() -> None:
    for kind in ("chosen", "list"):
        training_follows_one_device(kind, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))


@on_processes
def test_plain_tokens_on_processes() -> None:
    """Rank 1 has no tokens; all tokens go to the experts of one rank; sizes are read once."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    rank = mesh.get_rank()
    for kind, one_expert in (("chosen", False), ("chosen", True), ("list", False), ("list", True)):
        torch.manual_seed(0)
        alone = KINDS[kind](6, 8, 16)
        model = parallelize_module(copy.deepcopy(alone), mesh, ExpertParallel())
        x, weights = torch.randn(12, 8), torch.rand(12, 2)
        index = torch.rand(12, 6).topk(2).indices
        if one_expert:
            index, weights = torch.full((12, 1), 5), weights[:, :1]
        given = x.clone().requires_grad_()
        expected = alone(given, index, weights)
        expected.square().sum().backward()
        mine = slice(*((0, 5), (5, 5), (5, 11), (11, 12))[rank])
        own = x[mine].clone().requires_grad_()
        found = model(own, index[mine], weights[mine])
        found.square().sum().backward()
        torch.testing.assert_close(found.detach(), expected[mine].detach())
        torch.testing.assert_close(own.grad, given.grad[mine])
        assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))


# ---- without a style ------------------------------------------------------------------------------------------------


def placed_alone(mesh: DeviceMesh) -> None:
    """Sorting, indexing and grouped products of one device, with weights sharded by expert."""
    torch.manual_seed(1)
    sizes = {"experts": 8, "width": 32, "hidden": 64}
    x = torch.randn(29, 32)
    alone, model = made("sorted", **sizes), made("sorted", **sizes)
    expected = alone(x)
    loss_of(expected).backward()
    shard_parameters(model, mesh, lambda name, _: [Shard(0) if "experts" in name else Replicate()])
    tokens = distribute_tensor(x, mesh, [Shard(0)])
    with CommDebugMode() as comm:
        found = model(tokens)
        loss_of(found).backward()
    weights = sum(parameter.numel() * parameter.itemsize for parameter in alone.experts.parameters())
    assert comm.get_total_bytes() < weights // 2, "no expert is gathered"
    torch.testing.assert_close(whole(found[0]), expected[0].detach())
    assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))


def test_by_placement_alone() -> None:
    with mesh_of(4, names=("ep",)) as mesh:
        placed_alone(mesh)


@on_processes
def test_by_placement_alone_on_processes() -> None:
    placed_alone(init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
