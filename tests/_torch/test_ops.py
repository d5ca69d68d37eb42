"""The private names behind `_torch.ops`."""

import torch

from shardwise._torch.ops import (
    OpAttribute,
    OpOverload,
    OpOverloadPacket,
    builtin_of,
    overload_name,
    packet_name,
    schema_of,
)


def test_overloads_and_packets() -> None:
    assert isinstance(torch.ops.aten.add, OpOverloadPacket)
    assert isinstance(torch.ops.aten.add.Tensor, OpOverload)


def test_builtin_of_calls_the_same_op() -> None:
    call = builtin_of(torch.ops.aten.add.Tensor)
    assert call(torch.ones(2), torch.ones(2), alpha=3).tolist() == [4, 4]


def test_schemas_and_names() -> None:
    schema = schema_of(torch.ops.aten.add.Tensor)
    assert (schema.name, schema.overload_name) == ("aten::add", "Tensor")
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert packet_name(torch.ops.aten.add.Tensor) == packet_name(torch.ops.aten.add) == "aten::add"
    assert overload_name(torch.ops.aten.add.Tensor) == "Tensor"
    assert overload_name(torch.ops.aten.neg.default) == "default"


def test_an_attribute_is_computed_once_and_lives_on_the_op() -> None:
    computed = []

    def compute(func: OpOverload) -> int:
        computed.append(func)
        return len(schema_of(func).arguments)

    arity = OpAttribute("arity_in_a_test", compute)
    mm, neg = torch.ops.aten.mm.default, torch.ops.aten.neg.default
    assert (arity(mm), arity(mm), arity(neg)) == (2, 2, 1)
    assert computed == [mm, neg]
    assert arity.set(mm, 5) == 5
    assert (arity(mm), OpAttribute("another", compute)(mm)) == (5, 2)
