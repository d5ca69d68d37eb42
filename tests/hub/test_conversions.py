"""Conversions of transformers give the same on mosaics as on tensors, and shards are read and written bit by bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.core_model_loading")

import transformers
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import Chunk, Conv3dToLinear, Interleave, PermuteForRope, WeightConverter

from shardwise import P
from shardwise.errors import InputError
from shardwise.hub import load, save
from shardwise.hub.files import Stored
from shardwise.hub.mosaic import Mosaic
from shardwise.hub.positioned import Reader, Writer
from shardwise.hub.transfers import HeldShard, boxes_of, patches_to_load, patches_to_save, transfers_of
from tests.hub.models import assert_same
from tests.hub.test_mosaic import _apply, assembled
from tests.transformers.models import make
from tests.worlds import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:the plan's .* matches no module")

# ---- all conversions that transformers has ---------------------------------------------------------------------------

CONVERTED = {
    name: converters
    for name, mapping in conversion_mapping._build_checkpoint_conversion_mapping().items()
    if (converters := [each for each in mapping if isinstance(each, WeightConverter)])
}
SHAPES = [(12, 8), (4, 8, 6), (12,), (8, 3, 2, 2, 2)]


class Config:
    """Sizes that conversions ask for: the numbers of heads and of tensors in a list."""

    num_attention_heads = 2

    def get_text_config(self) -> Config:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self if name.endswith("_config") else 2


class Model:
    """A model whose parameters have 4 rows."""

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(4, 8)


def converted(converter: Any, tensors: dict[tuple[str, int], Any]) -> dict[str, Any]:
    converter.collected_tensors.clear()
    for (pattern, _), tensor in tensors.items():
        converter.add_tensor(converter.target_patterns[0], pattern, pattern, tensor)
    found = converter.convert(converter.target_patterns[0], model=Model(), config=Config())
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def check_converter(converter: Any) -> int:
    """Compare mosaics with tensors, for all shapes that the conversion takes; returns how many these are."""
    names = [(p, i) for p in converter.source_patterns for i in range(4 if "*" in p else 1)]
    taken = 0
    for shape in SHAPES:
        sources = {name: torch.randn(shape) for name in names}
        try:
            expected = converted(converter, sources)
        except (ValueError, RuntimeError, IndexError, NotImplementedError):
            continue
        mosaics = {name: Mosaic.of(str(name), shape, torch.float32) for name in names}
        found = converted(converter, mosaics)
        assert found.keys() == expected.keys()
        by_name = {str(name): tensor for name, tensor in sources.items()}
        for key, mosaic in found.items():
            assert torch.equal(assembled(mosaic, by_name), expected[key]), (converter, shape, key)
        taken += 1
    return taken


@pytest.mark.parametrize("name", CONVERTED)
def test_every_conversion_of_transformers(name: str) -> None:
    for converter in CONVERTED[name]:
        assert check_converter(converter)
        assert check_converter(converter.reverse_transform())


# ---- shards of tensors that are converted ----------------------------------------------------------------------------


def shards_of(tensor: Tensor, rng: random.Random) -> Iterator[HeldShard]:
    """Two shards with all elements of a tensor, divided in one dim into alternating runs."""
    dim = rng.randrange(tensor.dim())
    size = tensor.shape[dim]
    bounds = sorted({0, size, *(rng.randint(0, size) for _ in range(3))})
    runs = list(itertools.pairwise(bounds))
    for rank in range(2):
        own = tuple(runs[rank::2])
        indices = torch.cat([torch.arange(0), *(torch.arange(low, high) for low, high in own)])
        every = tuple(own if d == dim else ((0, n),) for d, n in enumerate(tensor.shape))
        yield HeldShard(rank, tensor.index_select(dim, indices), every, 0, 1)


@pytest.mark.parametrize("seed", range(150))
def test_shards_of_random_conversions(seed: int, tmp_path: Path) -> None:
    """A random conversion y of x: shards of x are saved as y, and the file x is loaded into shards of y."""
    rng = random.Random(seed)
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    y, mosaic = x, Mosaic.of("x", shape, torch.float32)
    for _ in range(4):
        kind, choice = rng.choice(["transpose", "reshape", "reshape", "chunk"]), rng.random()
        y, mosaic = (_apply(kind, random.Random(choice), value) for value in (y, mosaic))
    path = tmp_path / "file"

    path.write_bytes(bytes(4 * y.numel()))
    stored = Stored(path, 0, tuple(y.shape), y.dtype)
    with Writer() as writer:
        for shard in shards_of(x, rng):
            for patch in patches_to_save(mosaic, stored):
                for box in boxes_of(patch, tuple(shape)):
                    for transfer in transfers_of(stored, box, shard):
                        writer.write(transfer)
    assert writer.bytes == 4 * y.numel()
    assert torch.equal(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32), y.flatten())

    path.write_bytes(bytes(x.untyped_storage()))  # type: ignore[arg-type]
    file = {"x": Stored(path, 0, tuple(shape), x.dtype)}
    with Reader() as reader:
        for shard in shards_of(y.contiguous() if y.dim() else y.view(1), rng) if y.dim() else ():
            expected = shard.local.clone()
            shard.local.fill_(-1)
            for patch in patches_to_load(Mosaic.of("y", tuple(y.shape), y.dtype), mosaic, file):
                for box in boxes_of(patch, tuple(y.shape)):
                    for transfer in transfers_of(patch.stored, box, shard):
                        reader.read(transfer)
            assert torch.equal(shard.local, expected)


# ---- models ----------------------------------------------------------------------------------------------------------


def step_vision() -> Any:
    """q, k and v in one matrix and one vector, with the features of a head in another order."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.Step3p7VisionModel(transformers.Step3p7VisionConfig(**sizes, image_size=16, patch_size=4))


def qwen_experts() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3VLMoeTextConfig(
        **sizes, num_key_value_heads=2, head_dim=8, vocab_size=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen3VLMoeTextModel(config)


def filled(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def by_dim(dim: int) -> Any:
    return lambda name, parameter: P(*[None] * min(dim, parameter.dim() - 1), "tp") if parameter.dim() else None


MODELS: dict[str, Any] = {
    "step vision": step_vision,
    "qwen3vlmoe": qwen_experts,
    **{name: lambda name=name: make(name) for name in ("qwen3moe", "gpt_oss", "deepseek")},
}


def check_round_trip(model: Any, folder: Path) -> None:
    """from_pretrained and hub.load, save_pretrained and hub.save, are equal bit by bit."""
    model.save_pretrained(folder / "one")
    assert_same(type(model).from_pretrained(folder / "one"), model)
    with mesh_of(4, names=("tp",)) as mesh:
        for dim in (0, 1):
            found = load(type(model), folder / "one", mesh, by_dim(dim))
            assert_same(found, model)
            save(found, folder / "many", sync=False)
            one, many = (folder / at / "model.safetensors" for at in ("one", "many"))
            assert one.read_bytes() == many.read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    check_round_trip(filled(MODELS[name]()), tmp_path)


FUSED = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
CONVERTERS = {
    "interleaved": lambda: WeightConverter(
        "mlp.w13", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Interleave(dim=0), Chunk(dim=0)]
    ),
    "heads": lambda: WeightConverter(
        "self_attn.qkv", FUSED, [Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])]
    ),
    "convolution": lambda: WeightConverter("mlp.down", "mlp.down_proj.weight", [Conv3dToLinear(6, (2, 2, 2))]),
}


@pytest.mark.parametrize("kind", CONVERTERS)
def test_conversions_that_reshape(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    conversion_mapping.register_checkpoint_conversion_mapping("LlamaForCausalLM", [CONVERTERS[kind]()])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))
    check_round_trip(filled(model), tmp_path)
    keys = load_keys(tmp_path / "many")
    assert any(key.endswith(("w13", "qkv", "mlp.down")) for key in keys)


def load_keys(folder: Path) -> list[str]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors"))


class Scaled(core_model_loading.ConversionOps):
    def convert(self, input_dict: dict[str, Any], **others: Any) -> dict[str, Any]:
        return {key: torch.mul(value[0], 2) for key, value in input_dict.items()}


def test_a_conversion_that_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    scaled = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Scaled()])
    conversion_mapping.register_checkpoint_conversion_mapping("LlamaForCausalLM", [scaled])
    with mesh_of(4, names=("tp",)) as mesh, pytest.raises(InputError, match="calls 'mul', which does not only move"):
        load(type(model), tmp_path, mesh, by_dim(0))
