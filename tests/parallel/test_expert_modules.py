"""What experts communicate; lists, copies, state dicts and errors of modules with sharded experts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from shardwise import (
    DeviceMesh,
    DTensor,
    InterleavedShard,
    Replicate,
    Shard,
    distribute_tensor,
)
from shardwise.comm import token_route
from shardwise.errors import InputError
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.parallel.expert_checks import (
    assert_same,
    by_name,
    loss_of,
    made,
    on_ranks,
    parallel,
    whole,
)
from tests.parallel.mixtures import KINDS, ChosenExperts, Expert, ListedExperts, Mixture, SortedExperts
from tests.worlds import Recorder, mesh_of

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
        "cannot find the number of experts of a Linear, the first dim of all its 3-D parameters",
    ),
    "different experts": (
        lambda mesh: parallelize_module(nn.ModuleList([Expert(4, 8), Expert(4, 6)]), mesh, ExpertParallel()),
        r"expert 1 is a Expert with .*, expert 0 a Expert with",
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
        r"only 1 of 2 routed rows have an expert: an expert index is not in \[0, 3\]",
    ),
    "a negative index": (
        lambda mesh: parallelize_module(ChosenExperts(4, 8, 8), mesh, ExpertParallel())(
            *(on_ranks([t] * 2) for t in (torch.randn(2, 8), torch.tensor([[-1], [0]]), torch.rand(2, 1)))
        ),
        "only 1 of 2 routed rows have an expert",
    ),
    "a mixture of plain and distributed": (
        lambda mesh: parallelize_module(ChosenExperts(4, 8, 8), mesh, ExpertParallel())(
            distribute_tensor(torch.randn(2, 8), mesh, [Shard(0)]), torch.tensor([[1], [0]]), torch.rand(2, 1)
        ),
        "distributed tokens with a plain index",
    ),
    "a loop over a list": (
        lambda mesh: list(parallelize_module(ListedExperts(4, 8, 8), mesh, ExpertParallel())),  # type: ignore[call-overload]
        r"call the list with all tokens, experts\(tokens, index, weights\)",
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
