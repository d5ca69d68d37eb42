"""Which op has which rule, and variants derived from schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.notation import RuleError, reduction
from shardwise.ops.call import Call
from shardwise.ops.registry import Registry
from shardwise.ops.resolve import ResolvedOp
from shardwise.ops.schema import match_operands, tensor_arguments

aten = torch.ops.aten
ADD = "b?.., b?.. -> b.. ; linear 0+1"
MUL = "b?.., b?.. -> b.. ; linear 0 | 1"


def total(call: Call) -> str:
    return reduction(call.ndim(0), call.arg("dim", None), call.arg("keepdim", False))


@pytest.fixture
def table() -> Registry:
    rules = Registry()
    rules.register_table(
        {
            "aten::add": ADD,
            "aten::mul.Tensor": MUL,
            "aten::mm": "m k, k n -> m n ; linear 0 | 1",
            "aten::sum": total,
            "aten::max.other": "b?.., b?.. -> b.. ; reduce max",
            "aten::max.dim": "x [n] -> x, x",
            "aten::view.default": "x.. -> x..",
            "aten::pow": "b?.., b?.. -> b..",
            "aten::zeros": "-> a.. ; size=(a..)",
            "aten::abs": "b?.. -> b..",
            "aten::copy_": "x.., b?.. -> x..",
            "aten::addcdiv": "b?.., b?.., b?.. -> b..",
            "aten::lerp": "b?.., b?.., b?.. -> b..",
            "aten::clamp": "b?.., b?.., b?.. -> b..",
        }
    )
    return rules


def overload(name: str) -> Any:
    packet, _, rest = name.partition(".")
    return getattr(getattr(aten, packet), rest)


@pytest.mark.parametrize(
    ("name", "key", "variant", "operands", "writes"),
    [
        ("add.Tensor", "aten::add", "functional", (0, 1), ()),
        ("add.Scalar", "aten::add", "functional", (0, None), ()),
        ("add_.Tensor", "aten::add", "inplace", (0, 1), (0,)),
        ("add_.Scalar", "aten::add", "inplace", (0, None), (0,)),
        ("add.out", "aten::add", "out", (0, 1), (3,)),
        ("add.Scalar_out", "aten::add", "out", (0, None), (3,)),
        ("_foreach_add.List", "aten::add", "foreach", (0, 1), ()),
        ("_foreach_add.Tensor", "aten::add", "foreach", (0, 1), ()),
        ("_foreach_add_.Scalar", "aten::add", "foreach", (0, None), (0,)),
        ("_foreach_add.ScalarList", "aten::add", "foreach", (0, None), ()),
        ("mul.Tensor", "aten::mul.Tensor", "functional", (0, 1), ()),
        ("mul.Scalar", "aten::mul.Tensor", "functional", (0, None), ()),
        ("mul_.Scalar", "aten::mul.Tensor", "inplace", (0, None), (0,)),
        ("mul.out", "aten::mul.Tensor", "out", (0, 1), (2,)),
        ("_foreach_mul_.List", "aten::mul.Tensor", "foreach", (0, 1), (0,)),
        ("mm.default", "aten::mm", "functional", (0, 1), ()),
        ("mm.out", "aten::mm", "out", (0, 1), (2,)),
        ("mm.dtype", "aten::mm", "functional", (0, 1), ()),
        ("sum.default", "aten::sum", "functional", (0,), ()),
        ("sum.dim_IntList", "aten::sum", "functional", (0,), ()),
        ("sum.IntList_out", "aten::sum", "out", (0,), (4,)),
        ("max.out", "aten::max.other", "out", (0, 1), (2,)),
        ("max.dim_max", "aten::max.dim", "out", (0,), (3, 4)),
        ("pow.Scalar", "aten::pow", "functional", (None, 1), ()),
        ("pow.Tensor_Scalar", "aten::pow", "functional", (0, None), ()),
        ("pow_.Tensor", "aten::pow", "inplace", (0, 1), (0,)),
        ("_foreach_pow.ScalarAndTensor", "aten::pow", "foreach", (None, 1), ()),
        ("_foreach_abs_.default", "aten::abs", "foreach", (0,), (0,)),
        ("zeros.default", "aten::zeros", "functional", (), ()),
        ("zeros.out", "aten::zeros", "out", (), (1,)),
        ("copy_.default", "aten::copy_", "inplace", (0, 1), (0,)),
        ("_foreach_copy_.default", "aten::copy_", "foreach", (0, 1), (0,)),
        ("_foreach_addcdiv_.Scalar", "aten::addcdiv", "foreach", (0, 1, 2), (0,)),
        ("_foreach_lerp.List", "aten::lerp", "foreach", (0, 1, 2), ()),
        ("_foreach_lerp_.Scalar", "aten::lerp", "foreach", (0, 1, None), (0,)),
        ("clamp.default", "aten::clamp", "functional", (0, None, None), ()),
        ("clamp_.Tensor", "aten::clamp", "inplace", (0, 1, 2), (0,)),
    ],
)
def test_variants(table: Registry, name: str, key: str, variant: str, operands: Any, writes: Any) -> None:
    found = table.rule_for(overload(name))
    assert found is not None
    assert (found.key, found.variant, found.operands, found.writes) == (key, variant, operands, writes)
    assert table.rule_for(overload(name)) is found


@pytest.mark.parametrize(
    "name",
    [
        "max.default",  # no variant of either max: the other operand, or the dim, is not there
        "view.dtype",  # the view's size is not there
        "sub.Tensor",
        "_foreach_norm.Scalar",
        "_foreach_addcdiv.Tensor",  # a tensor more
    ],
)
def test_what_is_no_variant(table: Registry, name: str) -> None:
    assert table.rule_for(overload(name)) is None


def rule_text(table: Registry, func: Any, *args: Any, **kwargs: Any) -> str:
    found = table.rule_for(func)
    assert isinstance(found, ResolvedOp)
    return str(found.rule(Call.make(func, args, kwargs, found.operands)))


def test_rules_of_calls(table: Registry) -> None:
    x = torch.empty(4, 6, 2)
    assert rule_text(table, aten.add_.Tensor, x, x) == ADD
    assert rule_text(table, aten.add.Scalar, x, 3) == "b?.. -> b.."
    assert rule_text(table, aten.mul.Scalar, x, 3) == "b?.. -> b.. ; linear 0"
    assert rule_text(table, aten.zeros.default, [4]) == "-> a.. ; size=(a..)"
    assert rule_text(table, aten.sum.default, torch.empty(())) == "-> ; linear 0"
    assert rule_text(table, aten.sum.default, x) == "x0 x1 x2 -> ; linear 0"
    assert rule_text(table, aten.sum.dim_IntList, x, [-2], True) == "x0 x1 x2 -> x0 1 x2 ; linear 0"
    assert rule_text(table, aten.sum.IntList_out, x, [0], out=x) == "x0 x1 x2 -> x1 x2 ; linear 0"


def test_foreach_calls_are_looked_at_one_element_at_a_time(table: Registry) -> None:
    func = aten._foreach_add.ScalarList
    found = table.rule_for(func)
    assert found is not None
    call = Call.make(func, ([torch.empty(4, 6), torch.empty(3)], [1.0, 2.0]), {}, found.operands)
    element = call.element(1)
    assert (element.shape(0), element.arg("scalars")) == ((3,), 2.0)
    assert str(found.rule(element)) == "b?.. -> b.."
    assert [tuple(t.shape) for t in found.tensors(element)] == [(3,)]


def test_an_overload_of_its_own_comes_first(table: Registry) -> None:
    table.register(aten.add.Scalar, "b?.. -> b.. ; monotone 0")
    assert rule_text(table, aten.add.Scalar, torch.empty(3), 1) == "b?.. -> b.. ; monotone 0"
    assert rule_text(table, aten.add_.Scalar, torch.empty(3), 1) == "b?.. -> b.. ; monotone 0"
    assert rule_text(table, aten.add.Tensor, torch.empty(3), torch.empty(3)) == ADD
    table.register(aten.add, MUL)
    assert rule_text(table, aten.add.Tensor, torch.empty(3), torch.empty(3)) == MUL
    assert list(table)[-1] == "aten::add.Scalar"


def test_calls() -> None:
    meta = torch.empty(4, 6)
    call = Call.make(aten.native_layer_norm.default, (meta, [6], None, meta, 1e-5), {})
    assert call.tensors == (meta, None, meta)
    assert (call.shape(0), call.ndim(2), call.arg("eps")) == ((4, 6), 2, 1e-5)
    assert Call.make(aten.sum.dim_IntList, (meta, [1]), {}).arg("keepdim") is False
    with pytest.raises(RuleError, match=r"operand 1 of aten.native_layer_norm.default is no tensor"):
        call.shape(1)
    with pytest.raises(RuleError, match=r"has no argument 'size' in this call: its schema is aten::native_layer_norm"):
        call.arg("size")
    assert call.arg("size", 3) == 3


def test_tensor_arguments() -> None:
    kinds = {a.name: a.kind for a in tensor_arguments(aten.native_layer_norm.default)}
    assert kinds == {"input": "Tensor", "weight": "Tensor?", "bias": "Tensor?"}
    assert [a.kind for a in tensor_arguments(aten.index.Tensor)] == ["Tensor", "Tensor?[]"]
    assert [a.kind for a in tensor_arguments(aten.cat.default)] == ["Tensor[]"]
    assert [(a.name, a.write, a.out) for a in tensor_arguments(aten.add_.Tensor)] == [
        ("self", True, False),
        ("other", False, False),
    ]
    assert match_operands(aten.mm.default, aten.mm.default) == (0, 1)


def test_kernels(table: Registry) -> None:
    def kernel() -> None: ...

    table.register("aten::embedding", "v d, i.. -> i.. d ; kernel v", kernels={"v": kernel})
    found = table.rule_for(aten.embedding.default)
    assert found is not None
    assert found.kernel("v") is kernel
    table.register("aten::cumsum", lambda call: "x0 k1 -> x0 k1 ; kernel k1", kernels={"k": kernel})
    assert rule_text(table, aten.cumsum.default, torch.empty(2, 3), 1) == "x0 k1 -> x0 k1 ; kernel k1"
    table.register("aten::cumprod", lambda call: "x0 k -> x0 k ; kernel k")
    with pytest.raises(RuleError, match="aten::cumprod has no kernel for the factor k"):
        rule_text(table, aten.cumprod.default, torch.empty(2, 3), 1)


@pytest.mark.parametrize(
    ("op", "rule", "kernels", "message"),
    [
        ("aten::embedding", "v d, i.. -> i.. d ; kernel v", {}, "aten::embedding has kernels for nothing"),
        ("aten::mm", "m k, k n -> m n", {"k": print}, r"aten::mm has kernels for \['k'\]"),
        ("aten::mm", "m k, k n -> m q", {}, "only an output has the factor q"),
        ("mm", "m k, k n -> m n", {}, "no op is called 'mm'"),
    ],
)
def test_wrong_registrations(op: str, rule: str, kernels: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Registry().register(op, rule, kernels)


def test_a_rule_with_another_number_of_operands(table: Registry) -> None:
    table.register("aten::exp", lambda call: "a, a -> a")
    with pytest.raises(RuleError, match=r"a, a -> a of aten::exp has 2 operands: aten.exp.default has 1"):
        rule_text(table, aten.exp.default, torch.empty(3))
    table.register("aten::bmm", "b m k -> b m")
    with pytest.raises(RuleError, match=r"b m k -> b m of aten::bmm has 1 operands: write 2 patterns left of"):
        table.rule_for(aten.bmm.out)
