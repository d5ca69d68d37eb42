"""shardwise.parallel has the names and signatures of torch.distributed.tensor.parallel."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.tensor as theirs_root
import torch.distributed.tensor.parallel as theirs

import shardwise
from shardwise import parallel as ours


def arguments(function: object) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in parameters]


def test_same_names() -> None:
    assert set(ours.__all__) == {*theirs.__all__, "hub_plan", "ExpertParallel"}
    assert set(theirs_root.__all__) <= set(shardwise.__all__)


@pytest.mark.parametrize("name", theirs.__all__)
def test_same_arguments(name) -> None:
    assert arguments(getattr(ours, name)) == arguments(getattr(theirs, name))


def test_distribute_module_has_the_same_arguments() -> None:
    assert arguments(shardwise.distribute_module) == arguments(theirs_root.distribute_module)


def test_a_style_of_ones_own_says_apply() -> None:
    assert arguments(ours.ParallelStyle._apply) == arguments(theirs.ParallelStyle._apply)
    assert ours.ParallelStyle.src_data_rank == theirs.ParallelStyle.src_data_rank
    with pytest.raises(TypeError, match="abstract"):
        ours.ParallelStyle()
