"""transformers' Trainer under torchrun, with models that hub.load has sharded over four gloo processes."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.dropin.compatibility import EQUAL, results


def test_trainer_is_equal_to_one_process() -> None:
    found = dict(results("hub_trainer.py", "shardwise"))
    assert len(found) == 3
    assert set(found.values()) == {EQUAL}, found
