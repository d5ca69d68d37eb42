"""What schemas and tags say about running an op on every rank."""

from __future__ import annotations

import pytest
import torch

from shardwise._torch.ops import OpOverload
from shardwise.world.rank_op import describe

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm], ids=str)
def test_running_statistics_are_written_though_the_schema_does_not_say_so(op: OpOverload) -> None:
    assert [name for _, name in describe(op.default).writes] == ["running_mean", "running_var"]


@pytest.mark.parametrize(
    "op",
    [
        aten._native_batch_norm_legit_functional,
        aten._native_batch_norm_legit_no_training,
        aten._batch_norm_no_update,
        aten.native_batch_norm_backward,
    ],
    ids=str,
)
def test_running_statistics_that_are_read_are_not_written(op: OpOverload) -> None:
    assert describe(op.default).writes == ()


@pytest.mark.parametrize("op", [aten.resize_.default, aten.resize_as_.default, aten.set_.source_Tensor], ids=str)
def test_ops_that_resize_are_tagged(op: OpOverload) -> None:
    assert describe(op).resizes
    assert not describe(aten.add_.Tensor).resizes
