"""Models of transformers, distributed in several ways, train and generate as on one device.

By default a sample of the table runs; `SHARDWISE_ALL_MODELS=1` runs all of it, and `python -m tests.transformers.tiny`
prints it.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("transformers")

from tests.transformers import tiny

TABLE = [(name, way, task) for name in tiny.MODELS for way in tiny.WAYS for task in tiny.tasks_of(name)]
SAMPLE = [(name, way, task) for name, way, task in TABLE if task == "train" and way in ("by parameter", "styles")]


@pytest.mark.parametrize(("name", "way", "task"), TABLE if os.environ.get("SHARDWISE_ALL_MODELS") else SAMPLE)
@pytest.mark.filterwarnings("ignore::shardwise.dispatch.fallback.GatherWarning")
def test_a_model_computes_what_one_device_does(name: str, way: str, task: str) -> None:
    tiny.check(name, way, task)
