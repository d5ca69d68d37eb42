"""The private names behind `_torch.ops`."""

import torch

from shardwise._torch.ops import OpOverload, OpOverloadPacket, builtin_of


def test_overloads_and_packets() -> None:
    assert isinstance(torch.ops.aten.add, OpOverloadPacket)
    assert isinstance(torch.ops.aten.add.Tensor, OpOverload)


def test_builtin_of_calls_the_same_op() -> None:
    call = builtin_of(torch.ops.aten.add.Tensor)
    assert call(torch.ones(2), torch.ones(2), alpha=3).tolist() == [4, 4]
    schema = torch.ops.aten.add.Tensor._schema
    assert (schema.name, schema.overload_name) == ("aten::add", "Tensor")
    assert torch.ops.aten.neg.default._schema.overload_name == ""
