"""Every plan that a configuration of transformers holds consists of styles that are known here."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from shardwise.errors import InputError
from shardwise.parallel import hub_plan
from shardwise.parallel.names import NAMED, PARAMETERS

models = pytest.importorskip("transformers.models")
PLANS = ("base_model_tp_plan", "base_model_ep_plan")


def all_plans() -> dict[str, dict[str, str]]:
    """The plans of all configurations, by class and attribute."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(Path(models.__path__[0]).glob("*/configuration_*.py")):
        if "base_model_tp_plan" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for name, cls in vars(module).items():
            if inspect.isclass(cls):
                found |= {f"{name}.{attribute}": plan for attribute in PLANS if (plan := getattr(cls, attribute, None))}
    return found


def test_all_names_of_all_plans_are_known() -> None:
    plans = all_plans()
    assert len(plans) > 100
    unknown: dict[str, str] = {}
    for name, plan in plans.items():
        try:
            hub_plan(plan)
        except InputError as error:
            unknown[name] = str(error)
    assert unknown == {}


def test_the_names_that_transformers_itself_knows() -> None:
    styles = importlib.import_module("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES
    inference_only = {"megamoe_router", "megamoe_experts"}  # for a kernel that has no gradient
    assert set(styles.keys()) - inference_only <= {*NAMED, *PARAMETERS}
