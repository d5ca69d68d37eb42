"""The quickest binding of an op calls just that op, with just these arguments."""

from __future__ import annotations

import torch

from shardwise._torch.bindings import binding, types_key

aten = torch.ops.aten
x = torch.ones(2, 3)


def test_a_binding_of_the_same_name_is_found() -> None:
    assert binding(aten.t.default, (x,), {})(x).shape == (3, 2)
    add = binding(aten.add.Tensor, (x, x), {})
    assert add is not aten.add.Tensor
    assert torch.equal(add(x, x), x + x)


def test_a_binding_that_calls_another_op_is_not_taken() -> None:
    """`torch.sum(x)` calls the overload without dims: for one with dims the arguments decide."""
    found = binding(aten.sum.dim_IntList, (x, [1]), {})
    assert torch.equal(found(x, [1]), x.sum(1))
    found = binding(aten._to_copy.default, (x,), {"dtype": torch.float64})
    assert found(x, dtype=torch.float64).dtype == torch.float64


def test_an_op_without_a_binding_is_called_as_itself() -> None:
    found = binding(aten._softmax.default, (x, 1, False), {})
    assert torch.equal(found(x, 1, False), x.softmax(1))


def test_the_choice_depends_on_types() -> None:
    assert types_key((x, 1), {}) == types_key((x + 1, 2), {})
    assert types_key((x, 1), {}) != types_key((x, 1.0), {})
    assert types_key((x,), {}) != types_key((x.double(),), {})
