"""`transfer`: a model's state from a trainer's mesh to a generator's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise import DTensor, InterleavedShard, Partial, Replicate, Shard, distribute_tensor, simulate, transfer
from shardwise.comm import streaming
from shardwise.debug import CommDebugMode, explain
from shardwise.errors import CommunicationError, InputError, LayoutError, ShapeError
from shardwise.testing import assemble, make_dtensor
from shardwise.testing.live_bytes import LiveBytes
from shardwise.transferring import Part, TransferPlan, plan_transfer
from tests.comm.mesh_pairs import held
from tests.transferring.models import HEADS, KV_HEADS, WIDTH, fully_sharded, tensor_parallel, weights
from tests.worlds import fake_group

PLAIN = weights()


def meshes(first: list[int], second: Any) -> tuple[DeviceMesh, DeviceMesh]:
    ranks = torch.tensor(second)
    return DeviceMesh("cpu", first, mesh_dim_names=("fsdp",)), DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))


RANKS = {
    "same": ([0, 1, 2, 3, 4, 5, 6, 7], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "disjoint": ([0, 1, 2], [[3, 4], [5, 6]]),
    "overlapping": ([0, 1, 2, 3], [[3, 4], [2, 7]]),
}


@pytest.fixture(params=RANKS.values(), ids=RANKS)
def pair(request: Any) -> Any:
    with simulate(8):
        yield meshes(*request.param)


def check(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert isinstance(found[name], DTensor)
        assert torch.equal(assemble(found[name]), value), name


@pytest.mark.parametrize("bucket", [1 << 20, 8192, 1024])
def test_values_bytes_and_memory(pair: Any, bucket: int) -> None:
    trainer, generator = pair
    state = fully_sharded(PLAIN, trainer)
    plan = plan_transfer(state, generator, tensor_parallel, bucket_bytes=bucket)
    with CommDebugMode() as comm:
        found = transfer(state, generator, tensor_parallel, bucket_bytes=bucket)
    check(found, PLAIN)
    assert comm.get_total_counts() == comm.get_comm_counts()[torch.ops.c10d_functional.all_to_all_single]
    assert comm.get_total_counts() == plan.collectives == (1 if bucket == 1 << 20 else plan.collectives)
    lacking: dict[int, int] = {}
    for name, value in PLAIN.items():
        have = held(trainer, [Shard(0)], value.shape)
        for rank, need in held(generator, tensor_parallel(name, value.shape), value.shape).items():
            lacking[rank] = lacking.get(rank, 0) + 4 * len(need - have.get(rank, set()))
    assert plan.received_by == {rank: count for rank, count in lacking.items() if count}
    target = sum(shard.nbytes for tensor in found.values() for shard in tensor.shards.values())
    ranks = len({*trainer.mesh.flatten().tolist(), *generator.mesh.flatten().tolist()})
    with LiveBytes() as counted:
        transfer(state, generator, tensor_parallel, bucket_bytes=bucket)
    assert target <= counted.peak <= target + ranks * bucket


def test_placements_of_every_kind() -> None:
    with simulate(8):
        trainer, generator = meshes(*RANKS["same"])
        state = fully_sharded(PLAIN, trainer)
        by_name = {name: tensor_parallel(name, value.shape) for name, value in PLAIN.items()}
        for placements in (by_name, tensor_parallel, [Replicate(), Shard(0)], shardwise.P("tp")):
            check(transfer(state, generator, placements), PLAIN)


def test_tensors_are_renamed_and_left_out() -> None:
    with simulate(8):
        trainer, generator = meshes(*RANKS["disjoint"])
        state = fully_sharded(PLAIN, trainer) | {"step": 3, "extra": "text"}
        rename = {"embed.weight": "tokens", "step": "step"}.get
        found = transfer(state, generator, tensor_parallel, convert=rename)
        assert found.pop("step") == 3
        check(found, {"tokens": PLAIN["embed.weight"]})


def fuse(name: str) -> Any:
    for index, part in enumerate("qkv"):
        if f".{part}." in name:
            return name.replace(f".{part}.", ".qkv."), index
    return name


def fused(groups: int) -> dict[str, Tensor]:
    expected = {name: value for name, value in PLAIN.items() if fuse(name) == name}
    for layer in range(2):
        parts = [PLAIN[f"layers.{layer}.{part}.weight"].chunk(groups) for part in "qkv"]
        expected[f"layers.{layer}.qkv.weight"] = torch.cat([part[i] for i in range(groups) for part in parts])
    return expected


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), InterleavedShard(0, 2), Replicate()], ids=str)
def test_tensors_are_put_together(pair: Any, placement: Any) -> None:
    trainer, generator = pair

    def placements(name: str, shape: torch.Size) -> list[Any]:
        return [Replicate(), placement] if "qkv" in name else tensor_parallel(name, shape)

    state = fully_sharded(PLAIN, trainer)
    check(transfer(state, generator, placements, convert=fuse), fused(1))
    check(transfer(state, generator, placements, convert=fuse, bucket_bytes=2048), fused(1))


def test_each_rank_has_its_heads_of_q_k_and_v(pair: Any) -> None:
    """Also with fewer heads of keys and values than of queries."""
    trainer, generator = pair
    ranks = generator.size(1)

    def convert(name: str) -> Any:
        target = fuse(name)
        return target if isinstance(target, str) else Part(*target, groups=ranks)

    found = transfer(fully_sharded(PLAIN, trainer), generator, tensor_parallel, convert=convert)
    check(found, fused(ranks))
    shard = found["layers.0.qkv.weight"].shards[generator.mesh[0, 1].item()]
    rows = [PLAIN[f"layers.0.{part}.weight"].chunk(ranks)[1] for part in "qkv"]
    assert torch.equal(shard, torch.cat(rows))
    assert shard.shape == (2 * (HEADS + 2 * KV_HEADS) // ranks, WIDTH)


def test_a_fused_interleaved_weight_gives_each_rank_its_part_of_each() -> None:
    with simulate(8):
        trainer, generator = meshes(*RANKS["same"])
        plain = {part: torch.randn(8, 4) for part in "qkv"}
        found = transfer(
            fully_sharded(plain, trainer),
            generator,
            [Replicate(), InterleavedShard(0, 3)],
            convert=lambda name: ("qkv", "qkv".index(name)),
        )
        check(found, {"qkv": torch.cat(list(plain.values()))})
        for rank, shard in found["qkv"].shards.items():
            assert torch.equal(shard, torch.cat([value.chunk(4)[rank % 4] for value in plain.values()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_casts_on_the_way(pair: Any, dtype: torch.dtype) -> None:
    trainer, generator = pair
    state = fully_sharded(PLAIN | {"ids": torch.arange(24)}, trainer)
    plan = plan_transfer(state, generator, tensor_parallel, dtype=dtype)
    assert {shipment.wire for shipment in plan.shipments} == {
        torch.int64,
        torch.float32 if dtype is torch.float64 else dtype,
    }
    found = transfer(state, generator, tensor_parallel, dtype=dtype)
    assert torch.equal(assemble(found.pop("ids")), torch.arange(24))
    for name, value in PLAIN.items():
        assert found[name].dtype is dtype
        assert torch.equal(assemble(found[name]).float(), value.to(dtype).float()), name
    some = transfer(state, generator, tensor_parallel, dtype=lambda name: dtype if "norm" in name else None)
    assert some["norm.weight"].dtype is dtype
    assert some["embed.weight"].dtype is torch.float32


def test_into_tensors_that_exist(pair: Any) -> None:
    trainer, generator = pair
    zeros = {name: torch.zeros_like(value) for name, value in PLAIN.items()}
    there = {
        name: torch.nn.Parameter(distribute_tensor(value, generator, tensor_parallel(name, value.shape)))
        for name, value in zeros.items()
    }
    kept = {name: [shard.data_ptr() for shard in tensor.shards.values()] for name, tensor in there.items()}
    doubled = {name: (value * 2).sum() for name, value in there.items()}  # operands may be cached
    assert all(assemble(value).item() == 0 for value in doubled.values())
    versions = {name: value._version for name, value in there.items()}
    with LiveBytes() as counted:
        found = transfer(fully_sharded(PLAIN, trainer), into=there, bucket_bytes=4096)
    check(found, PLAIN)
    for name, tensor in there.items():
        assert found[name] is tensor
        assert [shard.data_ptr() for shard in tensor.shards.values()] == kept[name]
        assert tensor._version > versions[name]
        torch.testing.assert_close(assemble(tensor.detach().sum()), PLAIN[name].sum())
    source = sum(value.nbytes for value in PLAIN.values())
    assert counted.peak <= 2 * source + 8 * 4096  # the source was made inside; nothing was made for the target


def test_plain_partial_and_transposed_tensors(pair: Any) -> None:
    trainer, generator = pair
    value = torch.randint(-5, 5, (6, 8)).float()
    state: dict[str, Any] = {
        "plain": value,
        "partial": make_dtensor(value, trainer, [Partial()], seed=0),
        "transposed": distribute_tensor(value.t().contiguous(), trainer, [Shard(1)]).t(),
        "expanded": distribute_tensor(value[:1], trainer, [Shard(1)]).expand(6, 8),
        "scalar": distribute_tensor(torch.tensor(2.0), trainer, [Replicate()]),
        "empty": distribute_tensor(torch.empty(0, 3), trainer, [Shard(0)]),
    }
    expected = {"plain": value, "partial": value, "transposed": value, "expanded": value[:1].expand(6, 8)}
    expected |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}
    found = transfer(state, generator, lambda name, shape: [Replicate(), Shard(0) if shape else Replicate()])
    check(found, expected)


def test_a_result_shares_no_memory_with_its_source() -> None:
    with simulate(4):
        mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("a",))
        x = distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
        found = transfer({"x": x}, mesh, [Shard(0)])["x"]
        x.add_(1)
        assert torch.equal(assemble(found), torch.zeros(8))


def test_replicas_of_a_submesh_share_the_sending() -> None:
    """A model that is tensor-parallel over a slice of a mesh has a replica in each of its instances."""
    with simulate(8):
        world_mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"))
        generator = DeviceMesh("cpu", [0, 3], mesh_dim_names=("g",))
        state = {"w": distribute_tensor(PLAIN["embed.weight"], world_mesh["tp"], [Shard(0)])}
        sent = plan_transfer(state, generator, [Shard(1)]).shipments[0].route.sent
        assert {rank: sent[rank] for rank in (1, 2, 5, 6)} == dict.fromkeys((1, 2, 5, 6), 8 * WIDTH // 2)
        check(transfer(state, generator, [Shard(1)]), {"w": PLAIN["embed.weight"]})


def test_the_plan_prints(pair: Any) -> None:
    plan = plan_transfer(fully_sharded(PLAIN, pair[0]), pair[1], tensor_parallel)
    assert isinstance(plan, TransferPlan)
    assert f"14 tensors -> 14   mesh(fsdp={pair[0].size()}) -> mesh(dp=2, tp={pair[1].size(1)})" in str(plan)
    assert "1 exchange," in str(plan)
    specs = {name: tensor._spec for name, tensor in fully_sharded(PLAIN, pair[0]).items()}
    assert plan_transfer(specs, pair[1], tensor_parallel).received_by == plan.received_by


def test_its_communication_is_explained(pair: Any) -> None:
    state = fully_sharded(PLAIN, pair[0])
    with explain() as explained:
        transfer(state, pair[1], tensor_parallel)
    (told,) = explained.communications
    assert told.cause == "transfer"


def test_no_rank_needs_more_than_source_target_and_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank by rank, in a process group that moves nothing."""
    monkeypatch.setattr(streaming, "all_to_all", lambda sent, sizes, *_: sent.new_empty(sum(sizes)))
    for bucket in (1 << 20, 4096, 1024):
        for rank in range(8):
            with fake_group(8, rank):
                trainer, generator = meshes(*RANKS["overlapping"])
                state = fully_sharded(PLAIN, trainer)
                with LiveBytes() as counted:
                    found = transfer(state, generator, tensor_parallel, bucket_bytes=bucket)
                assert counted.peak <= sum(tensor.to_local().nbytes for tensor in found.values()) + bucket


def test_errors_say_what_to_do() -> None:
    with simulate(8):
        trainer, generator = meshes(*RANKS["disjoint"])
        state = fully_sharded({"q": torch.randn(8, 4), "k": torch.randn(6, 4), "v": torch.randn(8, 3)}, trainer)
        table: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (
                InputError,
                r"transfer got no placements for 'k'",
                {"placements": {"q": [Shard(0)] * 2}},
            ),
            (InputError, r"the parts of 'w' are q as part 1: number the parts", {"convert": {"q": ("w", 1)}.get}),
            (ShapeError, r"the parts of 'w' along dim 0", {"convert": {"q": ("w", 0), "v": ("w", 1)}.get}),
            (ShapeError, r"into 4 groups", {"convert": {"k": Part("w", 0, groups=4)}.get}),
            (
                InputError,
                r"the same `groups`, and the same `dim`",
                {"convert": {"q": Part("w", 0), "k": Part("w", 1, 1)}.get},
            ),
            (CommunicationError, r"use Shard and Replicate placements", {"placements": [Partial(), Shard(0)]}),
            (LayoutError, r"InterleavedShard", {"placements": [Replicate(), InterleavedShard(0, 5)]}),
            (InputError, r"'k' of shape \[6, 4\], which is not in `into`", {"into": {}, "mesh": generator}),
            (InputError, r"no mesh or no placements", {"mesh": None}),
        ]
        for error, message, changed in table:
            arguments = {"mesh": generator, "placements": [Replicate(), Shard(0)]} | changed
            with pytest.raises(error, match=message):
                transfer(state, **arguments)
        with pytest.raises(InputError, match="transfer got no state dict: pass source="):
            transfer(None, generator, [Shard(0)])
        with pytest.raises(InputError, match="only plain tensors"):
            transfer({"x": torch.ones(3)}, generator, [Shard(0)])
