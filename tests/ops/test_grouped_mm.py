"""Grouped products: one matrix for each group of rows, as the experts of a mixture have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, InterleavedShard, P, Placement, Replicate, Shard, distribute_tensor
from shardwise.comm import token_route
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError
from shardwise.ops import grouped_exchange
from tests.ops.helpers import check_case, on, r, ranks, table, whole

ENDS = torch.tensor([3, 3, 7, 12], dtype=torch.int32)
EIGHT = torch.tensor([1, 3, 3, 7, 8, 8, 11, 12], dtype=torch.int32)

CASES: list[Any] = [
    ("rows and matrices", lambda x, w, o: F.grouped_mm(x, w, offs=o), (r(12, 8), r(4, 8, 4), ENDS)),
    ("transposed", lambda x, w, o: F.grouped_mm(x, w.transpose(1, 2), offs=o), (r(12, 8), r(4, 4, 8), ENDS)),
    ("matrices and columns", lambda w, x, o: F.grouped_mm(w, x, offs=o), (r(4, 4, 8), r(8, 12), ENDS)),
    ("along the groups", lambda x, y, o: F.grouped_mm(x, y, offs=o), (r(4, 12), r(12, 8), ENDS)),
    ("batches", lambda x, y: F.grouped_mm(x, y), (r(3, 4, 8), r(3, 8, 4))),
]


@table(CASES)
def test_one_device_answer(fn: Any, args: Any) -> None:
    check_case(lambda *tensors: fn(*tensors).pow(2), args, limit=10)


def both(x: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """Two layers of experts, the first with a gate."""
    gate, value = F.grouped_mm(x, up.transpose(1, 2), offs=ends).chunk(2, -1)
    return F.grouped_mm(F.silu(gate) * value, down.transpose(1, 2), offs=ends)


LAYOUTS: dict[str, tuple[Placement, Placement]] = {
    "by features": (InterleavedShard(1, 2), Shard(2)),
    "by experts": (Shard(0), Shard(0)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", ["replicated", "over dp"])
def test_experts_are_not_gathered(layout: str, tokens: str) -> None:
    data = r(12, 512), r(8, 512, 512, seed=1) / 20, r(8, 512, 256, seed=2) / 20
    plain = [tensor.clone().requires_grad_() for tensor in data]
    expected = both(*plain, EIGHT)
    expected.square().sum().backward()
    with ranks(2, 2) as mesh:
        rows = Shard(0) if tokens == "over dp" else Replicate()
        of_up, of_down = LAYOUTS[layout]
        x = on(mesh, data[0], rows, Replicate(), grad=True)
        up, down = (on(mesh, w, Replicate(), p, grad=True) for w, p in zip(data[1:], (of_up, of_down), strict=True))
        ends = distribute_tensor(EIGHT, mesh, P())
        with CommDebugMode() as comm:
            result = both(x, up, down, ends)
        # By features nothing moves; by experts the hidden features of all tokens are summed.
        assert comm.get_total_bytes() <= (0 if layout == "by features" else 2 * 12 * 512 * 4)
        torch.testing.assert_close(whole(result), expected.detach())
        result.square().sum().backward()
        for mine, theirs in zip((x, up, down), plain, strict=True):
            assert mine.grad.placements == mine.placements
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_gradients() -> None:
    data = r(12, 8, dtype=torch.float64), r(4, 8, 4, dtype=torch.float64)

    def twice(x: Tensor, w: Tensor, ends: Tensor) -> list[Tensor]:
        product = F.grouped_mm(x, w, offs=ends) if isinstance(x, DTensor) else by_groups(x, w)
        gradients = torch.autograd.grad(product.pow(3).sum(), (x, w), create_graph=True)
        return list(torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), (x, w)))

    def by_groups(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([x[0:3] @ w[0], x[3:3] @ w[1], x[3:7] @ w[2], x[7:12] @ w[3]])

    expected = twice(*(tensor.clone().requires_grad_() for tensor in data), ENDS)
    with ranks(2) as mesh:
        for placements in (
            [Shard(1), Shard(1)],
            [Shard(0), Replicate()],
            [Replicate(), Shard(0)],
            [Shard(0), Shard(0)],
        ):
            tensors = (on(mesh, t, p, grad=True) for t, p in zip(data, placements, strict=True))
            found = twice(*tensors, distribute_tensor(ENDS, mesh, P()))
            for mine, plain in zip(found, expected, strict=True):
                torch.testing.assert_close(whole(mine), plain)


def test_a_bias_is_refused() -> None:
    with ranks(2) as mesh:
        x, w, ends = on(mesh, r(12, 8)), on(mesh, r(4, 8, 4)), distribute_tensor(ENDS, mesh, P())
        with pytest.raises(InputError, match="takes no bias and no out_dtype: add each group's bias"):
            torch._grouped_mm(x, w, offs=ends, bias=w[:, 0])


# ---- rows and groups over one axis ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [EIGHT, torch.full_like(EIGHT, 12)], ids=["several groups", "one group"])
@pytest.mark.parametrize("groups", [8, 3])
@pytest.mark.parametrize("axes", [(Shard(0), Shard(0)), (Replicate(), Shard(0)), ("features", Shard(0))], ids=str)
def test_rows_travel_to_groups_of_the_same_axis(axes: Any, groups: int, ends: Tensor) -> None:
    """Neither rows nor matrices are gathered; sizes are read once for three products, and no counts are sent."""
    ends = ends[:groups].contiguous()
    data = r(12, 16), r(groups, 32, 16, seed=1) / 4, r(groups, 16, 16, seed=2) / 4
    plain = [tensor.clone().requires_grad_() for tensor in data]
    grouped = int(ends[-1])  # PyTorch leaves the rows after the last group undefined; here they are zero
    expected = F.pad(both(plain[0][:grouped], *plain[1:], ends), (0, 0, 0, 12 - grouped))
    expected.square().sum().backward()
    with ranks(2, 4) as mesh:
        first, second = axes
        by_features = first == "features"
        x = on(mesh, data[0], Replicate() if by_features else first, second, grad=True)
        up = on(mesh, data[1], InterleavedShard(1, 2) if by_features else Replicate(), Shard(0), grad=True)
        down = on(mesh, data[2], Shard(2) if by_features else Replicate(), Shard(0), grad=True)
        where = distribute_tensor(ends, mesh, P())
        with CommDebugMode() as comm:
            result = both(x, up, down, where)
            result.square().sum().backward()
        counts = comm.get_comm_counts()
        assert counts[torch.ops.c10d_functional.all_to_all_single] >= 6
        # Over the other axis, features of the result are summed and gradients of the matrices are.
        assert by_features or counts[torch.ops.c10d_functional.all_gather_into_tensor] == 0
        torch.testing.assert_close(whole(result), expected.detach())
        for mine, theirs in zip((x, up, down), plain, strict=True):
            assert mine.grad.placements == mine.placements
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_layer_reads_sizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    read_sizes = token_route.read_sizes
    monkeypatch.setattr(token_route, "read_sizes", lambda sizes: reads.append(sizes) or read_sizes(sizes))
    with ranks(4) as mesh:
        x, up, down = on(mesh, r(12, 16), Shard(0), grad=True), *(on(mesh, r(8, n, 16), Shard(0)) for n in (32, 16))
        ends = distribute_tensor(EIGHT, mesh, P())
        both(x, up, down, ends).sum().backward()
        assert len(reads) == 1
        ends.clamp_(max=5)  # another route
        assert not whole(both(x, up, down, ends))[5:].any()
        assert len(reads) == 2
        assert len(ends.__dict__[grouped_exchange._ROUTES][1]) == 1  # the old one is dropped
    with ranks(4) as mesh, torch.inference_mode():
        tensors = (on(mesh, r(12, 16), Shard(0)), *(on(mesh, r(8, n, 16), Shard(0)) for n in (32, 16)))
        found = both(*tensors, distribute_tensor(EIGHT, mesh, P()))
        torch.testing.assert_close(whole(found), both(r(12, 16), r(8, 32, 16), r(8, 16, 16), EIGHT))
