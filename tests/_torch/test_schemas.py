"""The table of all ops."""

import torch

from shardwise._torch.schemas import composites_with_out, find_overload, is_composite, is_dispatched


def test_overloads_are_found_by_name() -> None:
    assert find_overload("aten::add.Tensor") is torch.ops.aten.add.Tensor
    assert find_overload("aten::relu") is torch.ops.aten.relu.default
    assert find_overload("aten::there_is_no_such_op") is None


def test_composite_ops() -> None:
    assert is_composite(torch.ops.aten.kron.default)
    assert not is_composite(torch.ops.aten.mul.Tensor)


def test_functions_of_torchscript_are_not_dispatched() -> None:
    assert is_dispatched(torch.ops.aten.kron.default)
    assert is_dispatched(torch.ops.aten.mul.Tensor)
    assert not is_dispatched(torch.ops.aten.__getitem__.Dict_Tensor)


def test_composite_ops_with_out_arguments() -> None:
    found = set(composites_with_out())
    assert torch.ops.aten.kron.out in found
    assert torch.ops.aten.mul.out not in found
