"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

from shardwise import rules
from shardwise.notation.frame import make_frame
from shardwise.sharding.layout import Factor, Layout

MODULES = ["patterns", "clauses", "rule", "kind", "frame", "solve", "bind", "refine", "build"]


@pytest.mark.parametrize("name", [*(f"notation.{name}" for name in MODULES), "ops.schema"])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"shardwise.{name}")
    known = {name: getattr(rules, name) for name in rules.__all__} | {
        "torch": torch,
        "make_frame": make_frame,
        "Layout": Layout,
        "Factor": Factor,
    }
    result = doctest.testmod(module, extraglobs=known, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
