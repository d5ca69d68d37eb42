"""Models of transformers: bitwise round trips between hub.save, hub.load and from_pretrained, on several meshes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from safetensors.torch import save_file

from shardwise import DTensor, P, Shard, init_device_mesh, replicate
from shardwise.errors import CheckpointError
from shardwise.fsdp import fully_shard
from shardwise.hub import load, load_with_report, save
from tests.hub.models import assert_same
from tests.processes.pool import on_processes
from tests.transformers.models import MODELS, make
from tests.worlds import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:the plan's .* matches no module")


def by_parameter(name: str, parameter: Tensor) -> Any:
    """Matrices sharded in their last dim over all axes, the rest in the first."""
    return P(*[None] * (parameter.dim() - 1), ("dp", "tp")) if parameter.dim() else None


PLANS: dict[str, tuple[tuple[int, ...], Any]] = {
    "1": ((1,), None),
    "4, fully sharded": ((4,), "fully_sharded"),
    "2x4, by parameter": ((2, 4), by_parameter),
}


def round_trip(model: Any, folder: Path, mesh: Any, plan: Any) -> None:
    """from_pretrained's files to a sharded model, and its files to from_pretrained: equal bit by bit."""
    found, report = load_with_report(type(model), folder / "one", mesh, plan)
    assert_same(found, model)
    assert report.read_bytes == report.shard_bytes
    save(found, folder / "many", sync=False)


def check_files(model: Any, folder: Path) -> None:
    """What the ranks wrote is what one process writes, byte by byte, and from_pretrained reads it."""
    names = [sorted(path.name for path in (folder / kind).iterdir()) for kind in ("one", "many")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (folder / "one" / name).read_bytes() == (folder / "many" / name).read_bytes(), name
    back = type(model).from_pretrained(folder / "many")
    assert_same(back, model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", PLANS)
def test_round_trips(name: str, way: str, tmp_path: Path) -> None:
    sizes, plan = PLANS[way]
    model = make(name)
    model.save_pretrained(tmp_path / "one")
    with mesh_of(*sizes, names=("dp", "tp")[-len(sizes) :]) as mesh:
        round_trip(model, tmp_path, mesh, plan)
    check_files(model, tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gemma"])
def test_the_plan_of_the_model_itself(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "one", max_shard_size="40KB")
    with mesh_of(2, 4, names=("dp", "tp")) as mesh:
        found = load(transformers.AutoModelForCausalLM, tmp_path / "one", mesh, "base_model_tp_plan")
        assert_same(found, model)
        again = load(type(model), tmp_path / "one", mesh, model.config.base_model_tp_plan)
        assert_same(again, model)
        layer, other = found.model.layers[0].self_attn, again.model.layers[0].self_attn
        assert layer.q_proj.weight.placements[1] == other.q_proj.weight.placements[1] == Shard(0)
        save(found, tmp_path / "many")
    assert_same(type(model).from_pretrained(tmp_path / "many"), model)


def test_experts_are_interleaved_and_read_from_a_matrix_each(tmp_path: Path) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path / "one")
    with mesh_of(4, names=("tp",)) as mesh:
        found = load(type(model), tmp_path / "one", mesh, "base_model_tp_plan")
        assert str(found.model.layers[0].mlp.experts.gate_up_proj._spec) == "f32[4, (2 48@tp), 32]"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """As from_pretrained casts: T5 keeps some weights in float32 if the rest is float16."""
    make("t5").save_pretrained(tmp_path)
    expected = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    with mesh_of(4) as mesh:
        plan = lambda name, parameter: P("a") if parameter.dim() else None  # noqa: E731
        assert_same(load(transformers.T5ForConditionalGeneration, tmp_path, mesh, plan, dtype=dtype), expected)


def test_a_model_that_was_made_on_the_meta_device(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with mesh_of(4) as mesh:
        assert_same(load(empty, tmp_path, mesh, lambda name, parameter: P("a")), model)


def test_a_buffer_that_the_model_itself_does_not_compute(tmp_path: Path) -> None:
    model: Any = make("llama")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config)
        empty.model.register_buffer("mask", torch.ones(3), persistent=False)
    with pytest.raises(CheckpointError, match=r"the buffers model\.mask are on the meta device"):
        load(empty, tmp_path)


def test_the_weights_of_a_base_model_fit_its_model_with_a_head(tmp_path: Path) -> None:
    model = make("llama")
    model.model.save_pretrained(tmp_path)
    with mesh_of(4) as mesh:
        assert_same(load(type(model.model), tmp_path, mesh), model.model)
        with pytest.raises(CheckpointError, match=r"1 missing:\n    lm_head.weight"):
            load(type(model), tmp_path, mesh)


def test_the_settings_of_generation(tmp_path: Path) -> None:
    model: Any = make("llama")
    model.generation_config.max_new_tokens = 5
    save(model, tmp_path / "a")
    assert load(type(model), tmp_path / "a").generation_config.max_new_tokens == 5
    assert not load(type(model), tmp_path / "a").training


def test_without_a_configuration(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(transformers.LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize(
    ("name", "axis", "plan"),
    [
        ("mixtral", None, "base_model_tp_plan"),
        ("gpt2", None, "by_parameter"),
        ("t5", "dp", "fully_sharded"),  # over dp, in two instances: each element is held by two ranks
        ("llama", "tp", "base_model_tp_plan"),
    ],
)
@on_processes
def test_on_processes(name: str, axis: str | None, plan: str, tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make(name)
    if rank == 0:
        model.save_pretrained(tmp_path / "one")
    torch.distributed.barrier()
    round_trip(model, tmp_path, mesh if axis is None else mesh[axis], by_parameter if plan == "by_parameter" else plan)
    if rank == 0:
        check_files(model, tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_replicated_model_is_saved_as_one_of_its_own_class(sharded: bool, tmp_path: Path) -> None:
    model = make("llama")
    with mesh_of(2, names=("dp",)) as mesh:
        found = fully_shard(make("llama"), mesh=mesh) if sharded else replicate(make("llama"), mesh=mesh)
        assert type(found) is not type(model)
        save(found, tmp_path / "many", sync=False)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert back.config.architectures == [type(model).__name__]


@on_processes
def test_errors_on_processes(tmp_path: Path) -> None:
    """A folder that one rank alone cannot read is an error on all of them."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    folder, path = tmp_path if rank != 2 else tmp_path / "elsewhere", tmp_path / "model.safetensors"
    if rank == 0:
        save_file({key: tensor.clone() for key, tensor in nn.Linear(4, 4).state_dict().items()}, path)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"rank 2: .* neither model\.safetensors"):
        load(lambda: nn.Linear(4, 4), folder, mesh)


def test_bytes_of_ranks_are_those_of_their_shards(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    with mesh_of(4, names=("tp",)) as mesh:
        found, report = load_with_report(type(model), tmp_path, mesh, lambda name, parameter: P("tp"))
        for rank in range(4):
            local = [p._local_tensor.shards[rank] for p in found.parameters() if isinstance(p, DTensor)]
            assert report.read_bytes[rank] == sum(math.prod(shard.shape) * 4 for shard in local)
