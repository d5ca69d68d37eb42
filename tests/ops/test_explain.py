"""What is known about an op, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import empty
from torch._ops import OpOverload

from shardwise import DTensor, Shard
from shardwise.extend import register_sharding
from shardwise.notation import parse
from shardwise.notation.frame import make_frame
from shardwise.ops.explain import _factors, _function
from shardwise.ops.kernel import Kernel
from shardwise.ops.op import ListKernel, Local, Never, Op
from shardwise.ops.registry import registry
from shardwise.rules import Explanation, Rule, RuleError, explain
from tests.ops.helpers import on, r, ranks

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with registry.restored():
        yield


MM = """\
aten::mm.default, defined in ops/matmul.py
    mm(Tensor self, Tensor mat2) -> Tensor
served by   its rule
rule        m k, k n -> m n ; linear 0 | 1
factors     m   pass-through
            k   reduced: where it is sharded, the result becomes Partial(sum)
            n   pass-through
Partial     sum, avg   pass through self, or mat2
            max, min   are reduced first
runs        on local shards: the op itself
variants    """


@pytest.mark.parametrize(
    "op",
    ["mm", "aten::mm", "aten.mm", "aten.mm.default", "torch.ops.aten.mm", aten.mm, aten.mm.default, torch.mm],
    ids=lambda op: f"{type(op).__name__} {op if isinstance(op, str) else ''}",
)
def test_an_op_in_any_form(op: Any) -> None:
    text = explain(op)
    assert isinstance(text, Explanation)
    assert repr(text) == str(text)
    assert text.startswith(MM)
    assert "aten::mm.out" in text.rpartition("variants")[2]


CASES: list[tuple[Any, tuple[Any, ...], list[str]]] = [
    (
        torch.sum,
        (),
        ["depends on the call: reduce_by (ops/reduce.py): The rule of", "pass example arguments"],
    ),
    (
        torch.sum,
        (empty(4, 6), 1),
        ["aten::sum.dim_IntList", "this call   x0 x1 -> x0 ; linear 0", "x1  reduced: where it is sharded, the result"],
    ),
    (
        "aten::mean",
        (empty(4, 6),),
        [
            "on local shards of calls that leave a partial sum: mean (ops/reduce.py)",
            "on all other local shards: the op",
        ],
    ),
    (F.linear, (), ["linear 0+2 | 1+2", "pass through input and bias, or weight and bias", "linear (ops/linear.py)"]),
    (F.linear, (empty(2, 3), empty(4, 3)), ["aten::linear.default", "n   pass-through"]),
    (
        torch.Tensor.add_,
        (empty(3), empty(3)),
        ["aten::add_.Tensor", "its rule for aten::add", "sum, avg   pass through self and other", "_foreach_add_.List"],
    ),
    (
        aten.embedding,
        (),
        [
            "v   handled by a kernel; where it is sharded, the result becomes Partial(sum)",
            "kernels     v   no communication: embedding (ops/embedding.py): Look up the rows",
        ],
    ),
    (
        torch.argmax,
        (empty(3, 4), 1),
        ["k1  handled by a kernel\n", "k   1 collective; several such dims may be sharded at once: extreme"],
    ),
    (aten.maximum.default, (empty(3), empty(3)), ["max        passes through self, or self and other, or other"]),
    (torch.neg, (empty(3),), ["max, min   pass through self and change places"]),
    (torch.nonzero, (empty(3),), ["served by   running on gathered inputs", "the result depends on data"]),
    (torch.matmul, (), ["decomposition into other ops by PyTorch; pass example arguments"]),
    (torch.matmul, (empty(2, 3, 4), empty(4, 5)), ["aten::view.default", "aten::mm.default", "aten::_unsafe_view"]),
    (torch.histc, (), ["otherwise   decomposed by histc_of_data (ops/histogram.py)", "reads values of numbers"]),
    (aten.t_.default, (), ["the tensor becomes the result of aten::t.default"]),
    ("view", (), ["writes      to the view reach the viewed tensor by put_reshaped (ops/views.py)"]),
    ("_foreach_norm", (), ["on lists of local shards: norms (ops/optim.py)"]),
    (torch.sin, (), ["which follows from PyTorch's tag for elementwise ops", "b?.. -> b.."]),
    (torch.ones_like, (), ["Partial     any        is not reduced: no values are read"]),
    (torch.hamming_window, (), ["served by   nothing: it takes no tensors"]),
    (torch.sort, (empty(3, 4), 1), ["x1  must be replicated"]),
    (torch.equal, (), ["served by   decomposition", "otherwise   decomposed by equal (ops/reduce.py)"]),
    (aten._unique2, (), ["served by   running on gathered inputs", "the result depends on data"]),
    (
        torch.histogramdd,
        (empty(3, 2), [4, 4]),
        ["this call   has no rule: it is decomposed, or runs on"],
    ),
]


@pytest.mark.parametrize(("op", "args", "texts"), CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_what_is_said(op: Any, args: tuple[Any, ...], texts: list[str]) -> None:
    said = explain(op, *args)
    for text in texts:
        assert text in said


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("torch.add", "aten::add.Tensor"),
        ("torch.Tensor.add_", "aten::add_.Tensor"),
        ("torch.nn.functional.linear", "aten::linear.default"),
        ("torch.ops.aten.sum.dim_IntList", "aten::sum.dim_IntList"),
    ],
)
def test_a_function_by_its_name(name: str, op: str) -> None:
    assert explain(name).startswith(f"{op}, defined in ops/")


def test_a_rule_of_the_generated_table() -> None:
    from shardwise.ops import generated

    names = [name for name in generated.table() if name not in registry and name.startswith("aten::")]
    said = explain(names[0])
    assert "served by   a generated rule" in said
    assert "defined in ops/generated.txt" in said
    assert f"the first of these lines that fits the call: {names[0]}" in said


def test_a_rule_of_the_user() -> None:
    register_sharding(aten.mm.default, "m k, k n -> m n")
    said = explain("mm")
    assert "aten::mm.default, defined in a call of register" in said
    assert "served by   the user's rule for aten::mm.default" in said
    assert "built in    the rule m k, k n -> m n ; linear 0 | 1 is replaced" in said
    register_sharding(aten.mean.dim, "x0 x1 -> x0 ; linear 0")
    assert "the rule by reduce_by (ops/reduce.py) is the same" in explain(torch.mean, empty(3, 4), 1)


def test_an_op_of_the_user() -> None:
    library = torch.library.Library("shardwise_explained", "DEF")
    library.define("scale_rows(Tensor x, Tensor s) -> Tensor")
    assert "served by   running on gathered inputs" in explain("shardwise_explained::scale_rows")
    register_sharding(torch.ops.shardwise_explained.scale_rows.default, "m n, m -> m n ; linear 0 | 1")
    said = explain("shardwise_explained.scale_rows")
    assert "rule        m n, m -> m n ; linear 0 | 1" in said
    assert "sum, avg   pass through x, or s" in said


def test_what_is_no_op() -> None:
    with pytest.raises(RuleError, match="no op is called 'nonsense': pass a name such as aten::add"):
        explain("nonsense")
    with pytest.raises(RuleError, match=r"no op is called 'aten::mm\.nonsense'"):
        explain("aten::mm.nonsense")
    scripted = torch.Tensor.__getitem__, torch.Tensor.backward, torch.manual_seed  # TorchScript has ops of these names
    for function in (F.cross_entropy, torch.unique, lambda x: x, torch.Tensor.__eq__, torch.Tensor.__init__, *scripted):
        with pytest.raises(RuleError, match="is not an op: pass example arguments"):
            explain(function)
    for op in ("__getitem__", "aten::backward"):
        with pytest.raises(RuleError, match=f"no op is called '{op}'"):
            explain(op)
    for op in (aten.__getitem__, aten.__getitem__.Dict_Tensor, aten.acos.int):
        with pytest.raises(
            RuleError, match=r"aten\.\w+(\.\w+)? is a function of TorchScript alone: pass an op that takes"
        ):
            explain(op)
    assert "aten::_unique2" in explain(torch.unique, torch.zeros(3))
    assert "aten::select.int" in explain(torch.Tensor.__getitem__, empty(3, 4), 1)


def _yes(*args: object) -> Any:
    """Whatever the arguments are."""


FACTS: dict[str, tuple[object, str]] = {
    "layout_rule": (_yes, "operands of some layouts have another rule: _yes"),
    "kernels": ({"k": Kernel(_yes)}, "kernels     k   1 collective: _yes"),
    "local": (Local(_yes), "on local shards: _yes"),
    "draw": (_yes, "with a generator that all ranks share: _yes"),
    "list_kernel": (ListKernel(_yes), "on lists of local shards: _yes"),
    "decomposition": (_yes, "otherwise   decomposed by _yes"),
    "updates": (("mean",), "the decomposition writes mean"),
    "python": (_yes, "on local shards: _yes"),
    "put": (_yes, "to the view reach the viewed tensor by _yes"),
    "override": (_yes, "first       caught above autograd by _yes"),
    "cpu_dtypes": (_yes, "on CPUs results have other dtypes than the meta kernel returns: _yes"),
    "gradient_of": ("x", "the result is the gradient of x"),
    "strides": ("row-major", "strides of results: row-major"),
}


def test_every_fact_about_an_op_is_said() -> None:
    library = torch.library.Library("shardwise_facts", "DEF")
    known = {each.name: each for each in fields(Op)}
    facts = known.keys() - {"name", "rule", "origin", "file"}
    for name in sorted(facts):
        library.define(f"{name}(Tensor x) -> Tensor")
        value, text = FACTS.get(name, (True, ""))
        registry.define(Op(f"shardwise_facts::{name}", "m -> m", **{name: value}))
        said = explain(f"shardwise_facts::{name}")
        assert text in said, name
        assert text or known[name].default is False, f"say here what is said of {name}"
        assert text or "notes       " in said, name


def _bound_kinds(rule: Rule) -> dict[str, str]:
    """The kinds that dispatch gives the factors of a rule, for operands whose ellipses have one dim."""
    ranks_of = [(len(p.dims),) if p.listed else len(p.dims) for p in (*rule.inputs, *rule.outputs)]
    atoms = {atom.name: atom for p in (*rule.inputs, *rule.outputs) for dim in p.dims for atom in dim}
    many = [name for name, atom in atoms.items() if atom.many and name != "_"]
    split = len(rule.inputs)
    frame = make_frame(rule, tuple(ranks_of[:split]), tuple(ranks_of[split:]), tuple((name, 1) for name in many))
    names = {f"{name}0": f"{name}.." for name in many}
    return {names.get(name, name): mark.kind.value for name, mark in zip(frame.names, frame.marks, strict=True)}


def test_factors_have_the_kinds_that_dispatch_gives_them() -> None:
    """Of every rule that is a text, and of some that are made for a call."""
    made = [
        "x.. -> _ _ ; unread",
        "a b -> a ; reduce same",
        "b.. k -> b.. ; reduce none",
        "a b -> a, b ; reduce max, same",
    ]
    texts = [source for name in registry if isinstance(source := registry[name].rule, str)]
    rules = {*map(parse, texts), *map(parse, made)}
    assert len(rules) > 60
    for rule in rules:
        said = {name: text.partition(":")[0].partition(";")[0] for name, text in _factors(rule) if name != "_"}
        assert said == _bound_kinds(rule), str(rule)


def test_every_function_that_is_named_says_what_it_does() -> None:
    for name in registry:
        op = registry[name]
        given = [getattr(op, each.name) for each in fields(op)]
        runs = [each.run for each in (*op.kernels.values(), op.local, op.list_kernel) if each is not None]
        for function in (*given, *runs):
            if callable(function) and not isinstance(function, (Rule, Never)):
                assert ": " in _function(function), f"{name}: {_function(function)} has no docstring"


SERVED: dict[OpOverload, tuple[str, list[OpOverload]]] = {
    aten.isnan.out: ("aten::isnan without out=", [aten.isnan.default]),
    aten.nonzero.out: ("aten::nonzero without out=", [aten.nonzero.default]),
    aten.celu.out: ("aten::celu without out=", [aten.celu.default]),
    aten.square.default: ("decomposition into other ops by PyTorch; in inference mode by", [aten.pow.Tensor_Scalar]),
    aten.std.default: ("decomposition into other ops by PyTorch; in inference mode by", [aten.std.correction]),
    aten.relu6.default: ("decomposition into other ops by PyTorch; in inference mode by", [aten.hardtanh.default]),
    aten.multinomial.default: ("decomposition into other ops", [aten.exponential_.default, aten.topk.default]),
    aten.relu.default: ("its rule", [aten.relu.default]),
    aten.relu_.default: ("its rule for aten::relu", [aten.relu_.default]),
    aten.t.default: ("its rule", [aten.t.default]),
    aten._local_scalar_dense.default: ("reading the number", []),
    aten.nonzero.default: ("running on gathered inputs", []),
    aten.masked_select.default: ("running on gathered inputs", []),
}
ARGUMENTS: dict[OpOverload, tuple[Any, ...]] = {
    aten.multinomial.default: (2,),
    aten.masked_select.default: (torch.tensor([True, False]),),
}
OUT = {aten.nonzero.out: torch.int64, aten.isnan.out: torch.bool, aten.celu.out: torch.float32}


@pytest.mark.parametrize("func", SERVED, ids=str)
def test_an_op_is_served_as_it_is_said(func: OpOverload) -> None:
    text, ops = SERVED[func]
    assert f"served by   {text}" in explain(func)
    with ranks(2) as mesh, DTensor._op_dispatcher.recording() as plans:
        x = (
            on(mesh, torch.tensor(1.0))
            if func is aten._local_scalar_dense.default
            else on(mesh, r(4, 2).abs(), Shard(0))
        )
        arguments = [on(mesh, a) if isinstance(a, torch.Tensor) else a for a in ARGUMENTS.get(func, ())]
        out = {"out": on(mesh, torch.empty(0, dtype=OUT[func]))} if func in OUT else {}
        plans.clear()
        func(x, *arguments, **out)
        planned = [plan.op.func for plan in plans if plan.plan is not None]
        assert set(ops) <= {plan.op.func for plan in plans}
        assert (func in planned) == text.startswith("its rule")


def test_composites_are_served_by_their_rules_in_inference_mode() -> None:
    with ranks(2) as mesh, torch.inference_mode(), DTensor._op_dispatcher.recording() as plans:
        torch.square(on(mesh, r(4, 2), Shard(0)))
        assert [plan.op.func for plan in plans if plan.plan is not None] == [aten.square.default]
