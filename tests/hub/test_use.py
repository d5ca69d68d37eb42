"""Models that hub.load has sharded generate and train, with the tools of transformers, as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from shardwise import P, init_device_mesh
from shardwise.experimental import implicit_replication
from shardwise.hub import load, save
from tests.hub.models import assert_same, plain
from tests.processes.pool import on_processes
from tests.transformers.models import batch_of, make
from tests.worlds import mesh_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:the plan's .* matches no module"),
    pytest.mark.filterwarnings("ignore:aten._grouped_mm"),
]

TP, FULLY = "base_model_tp_plan", "fully_sharded"


def by_rows(name: str, parameter: Tensor) -> Any:
    return P("tp") if parameter.dim() else None


# The models have 2 heads of keys and values, or 4: fewer than ranks, or as many.
GENERATED = [
    ("llama", TP, {}),
    ("llama", FULLY, {}),
    ("qwen3", TP, {}),
    ("mixtral", TP, {}),
    ("gpt2", FULLY, {}),
    ("gpt2", by_rows, {"cache_implementation": "static"}),
    ("t5", FULLY, {}),
    ("t5", by_rows, {}),
]


@pytest.mark.parametrize(
    ("name", "plan", "options"), GENERATED, ids=[f"{n} {i}" for i, (n, *_) in enumerate(GENERATED)]
)
def test_generate(name: str, plan: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model: Any = make(name).eval()
    model.save_pretrained(tmp_path)
    prompts = batch_of(name)["input_ids"][:2, :4]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **options}
    expected = model.generate(prompts, **options)
    with mesh_of(4, names=("tp",)) as mesh, implicit_replication(), torch.no_grad():
        found = load(type(model), tmp_path, mesh, plan)
        found.generation_config.eos_token_id = None
        assert torch.equal(plain(found.generate(prompts, **options)), expected)


@on_processes
def test_generate_on_processes(tmp_path: Path) -> None:
    model: Any = make("llama").eval()
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(tmp_path)
    torch.distributed.barrier()
    prompts = batch_of("llama")["input_ids"][:2, :4]
    options: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        found = load(type(model), tmp_path, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), TP)
        found.generation_config.eos_token_id = None
        assert torch.equal(found.generate(prompts, **options), model.generate(prompts, **options))


def trained(model: Any, name: str, folder: Path, checkpointing: bool) -> list[float]:
    """The losses of two steps of transformers' Trainer."""
    batch = batch_of(name)
    rows = [{key: values[i] for key, values in batch.items()} for i in range(4)]
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        adam_epsilon=1e-3,  # gradients near 0 do not become noise
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=checkpointing,
        seed=0,
    )
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


TRAINED = [
    ("llama", TP, True),
    ("qwen3", FULLY, True),
    ("mixtral", TP, False),
    ("gpt2", by_rows, True),
    ("t5", FULLY, False),
    ("vit", by_rows, True),
]


@pytest.mark.parametrize(("name", "plan", "checkpointing"), TRAINED, ids=[name for name, *_ in TRAINED])
def test_trainer(name: str, plan: Any, checkpointing: bool, tmp_path: Path) -> None:
    model: Any = make(name)
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model")
    expected = trained(model, name, tmp_path, checkpointing)
    with mesh_of(4, names=("tp",)) as mesh, implicit_replication():
        found = load(type(model), tmp_path / "model", mesh, plan)
        assert trained(found, name, tmp_path, checkpointing) == pytest.approx(expected, rel=1e-4)
        for (path, one), other in zip(model.named_parameters(), found.parameters(), strict=True):
            torch.testing.assert_close(plain(other), one.detach(), atol=1e-3, rtol=1e-3, msg=path)
        save(found, tmp_path / "trained", sync=False)
        assert_same(type(model).from_pretrained(tmp_path / "trained"), _gathered(found, model))


def _gathered(found: Any, model: Any) -> Any:
    """A plain model with the values of a sharded one."""
    with torch.no_grad():
        for one, other in zip(model.parameters(), found.parameters(), strict=True):
            one.copy_(plain(other))
    return model.cpu()
