"""Models of transformers, distributed in several ways, train and generate as on one device.

By default a sample of the table runs: each model does each task in one way, and trains in two more.
`SHARDWISE_ALL_MODELS=1` runs all of it, and `python -m tests.transformers.table` prints it.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("transformers")

from shardwise import init_device_mesh
from tests.processes.pool import on_processes
from tests.transformers import tiny
from tests.transformers.models import MODELS

TABLE = [(name, way, task) for name in MODELS for way in tiny.WAYS for task in tiny.tasks_of(name)]


def _sample() -> list[tuple[str, str, str]]:
    ways = list(tiny.WAYS)
    chosen = {(name, way, "train") for name in MODELS for way in ("by parameter", "styles")}
    for i, name in enumerate(MODELS):
        chosen |= {(name, ways[(i + j) % len(ways)], task) for j, task in enumerate(tiny.tasks_of(name))}
    return [entry for entry in TABLE if entry in chosen]


@pytest.mark.parametrize(("name", "way", "task"), TABLE if os.environ.get("SHARDWISE_ALL_MODELS") else _sample())
@pytest.mark.filterwarnings("ignore:aten._grouped_mm")
def test_a_model_computes_what_one_device_does(name: str, way: str, task: str) -> None:
    tiny.check(name, way, task)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_more_ranks_than_key_value_heads(name: str) -> None:
    tiny.check(name, "styles", "train", (4,))
    tiny.check(name, "styles", "static cache", (4,))


@on_processes
def test_on_processes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for way, task in (("mixed", "train"), ("styles", "static cache"), ("by parameter", "sampling")):
        tiny.compare(tiny.on_mesh("gemma", way, task, mesh), tiny.expected("gemma", task))
