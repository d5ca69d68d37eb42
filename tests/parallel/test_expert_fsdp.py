"""Experts over one axis, and all parameters sharded over another by `fully_shard`, follow one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import Placement, Replicate, Shard, distribute_tensor
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.parallel.expert_checks import (
    FEATURES,
    assert_same,
    by_name,
    loss_of,
    made,
    network,
    on_ranks,
    trained,
    whole,
)
from tests.worlds import mesh_of

fsdp: Any = pytest.importorskip("shardwise.fsdp")


@pytest.mark.parametrize(
    ("sizes", "features"), [((2, 4), None), ((2, 2, 2), FEATURES)], ids=["dp, ep", "dp, ep and tp"]
)
def test_training(sizes: tuple[int, ...], features: dict[str, Placement] | None) -> None:
    alone, model = network("chosen"), network("chosen")
    expected = trained(alone, lambda t: t)
    with mesh_of(*sizes, names=("dp", "ep", "tp")) as mesh:
        parallelize_module(model, mesh, {"mixtures.*.experts": ExpertParallel(features=features)})
        for mixture in model.mixtures:
            fsdp.fully_shard(mixture, mesh=mesh["dp"])
        fsdp.fully_shard(model, mesh=mesh["dp"])
        placements = [Shard(0), Shard(0), Replicate()][: mesh.ndim]
        found = trained(model, lambda t: distribute_tensor(t, mesh, placements))
        assert found == pytest.approx(expected, abs=1e-4)
        assert_same(by_name(model, whole), by_name(alone, lambda p: p.detach()), 1e-4)


def test_local_tokens_and_averaged_gradients() -> None:
    """Router and experts are sharded over different axes; the gradients of both are averages over all ranks."""
    x = torch.randn(4, 6, 8)
    alone = made("chosen")
    for own in x:
        (loss_of(alone(own)) / 4).backward()
    with mesh_of(2, 2, names=("dp", "ep")) as mesh:
        model = made("chosen")
        parallelize_module(model, mesh["ep"], {"experts": ExpertParallel(gradient_reduction="mean")})
        fsdp.fully_shard(model.experts, mesh=mesh["dp"])
        fsdp.fully_shard(model, mesh=mesh)
        loss_of(model(on_ranks(list(x)))).backward()
        assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))
