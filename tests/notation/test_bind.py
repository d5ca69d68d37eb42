"""Binding rules to shapes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shardwise.notation import (
    BindError,
    Bound,
    FactorKind,
    bind,
    local_size,
    output_layout,
    output_partial,
    parse,
    passes,
    refine,
    sharded_layout,
)
from shardwise.notation.frame import make_frame
from shardwise.sharding.layout import Factor, Layout

LAYER_NORM = "b.. [n..], [n..], [n..] -> b.. [n..], b.. _.., b.. _.."
SPLIT = "(a b) c -> a (b c) ; size=(a (b c))"
PAIR = "a b -> a b ; size=(a b)"


def sizes(bound: Bound) -> str:
    """Factors as text; a star marks those that must be replicated."""
    return " ".join(f"{f.name}={f.size}{'*' if f.must_replicate else ''}" for f in bound.factors)


def named(bound: Bound, tensor: Any) -> str:
    names = [[bound.factors[f].name for f in dim] for dim in tensor.dims]
    return " ".join("_" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in names)


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "given", "factors", "dims"),
    [
        ("m k, k n -> m n", [(4, 6), (6, 8)], None, {}, "m=4 k=6 n=8", "m k, k n -> m n"),
        ("x.. -> x..", [(4, 6, 2)], None, {}, "x0=4 x1=6 x2=2", "x0 x1 x2 -> x0 x1 x2"),
        ("x.. -> x..", [()], None, {}, "", " -> "),
        ("b?.., b?.. -> b..", [(4, 6), (6,)], None, {}, "b0=4 b1=6", "b0 b1, b1 -> b0 b1"),
        ("b?.., b?.. -> b..", [(6,), (4, 1)], None, {}, "b1=6 b0=4", "b1, b0 _ -> b0 b1"),
        ("b?.., b?.. -> b..", [(4, 6), ()], None, {}, "b0=4 b1=6", "b0 b1,  -> b0 b1"),
        ("b?.., b?.. -> b..", [(1, 5), (1, 1)], None, {}, "b0=1 b1=5", "b0 b1, b0 _ -> b0 b1"),
        ("b?.., b?.. -> b..", [(0, 5), (1, 1)], None, {}, "b0=0 b1=5", "b0 b1, _ _ -> b0 b1"),
        ("b?.. -> b..", [(5,)], [(3, 5)], {}, "b1=5 b0=3", "b1 -> b0 b1"),
        ("a? b?, a? b? -> a b", [(6,), (4, 6)], None, {}, "b=6 a=4", "b, a b -> a b"),
        ("m? n?, m k, k n -> m n", [(1, 8), (4, 6), (6, 8)], None, {}, "m=4 n=8 k=6", "_ n, m k, k n -> m n"),
        ("m? n?, m k, k n -> m n", [(), (4, 6), (6, 8)], None, {}, "m=4 k=6 n=8", ", m k, k n -> m n"),
        ("b?.. m k, b?.. k n -> b.. m n", [(3, 1, 4, 6), (2, 6, 5)], None, {}, "b0=3 b1=2 m=4 k=6 n=5",
         "b0 _ m k, b1 k n -> b0 b1 m n"),
        ("(a b) c -> a (b c)", [(24, 8)], [(4, 48)], {}, "a=4 b=6 c=8", "(a b) c -> a (b c)"),
        ("(a b) c -> a (b c)", [(24, 8)], None, {"b": 6}, "a=4 b=6 c=8", "(a b) c -> a (b c)"),
        (SPLIT, [(24, 8)], None, {"size": [4, -1]}, "a=4 b=6 c=8", "(a b) c -> a (b c)"),
        ("(a b) -> a b ; a=2", [(6,)], None, {}, "a=2 b=3", "(a b) -> a b"),
        ("(a b c) -> a (b c), (a b) c", [(24,)], [(2, 12), (6, 4)], {}, "a=2 b=3 c=4", "(a b c) -> a (b c), (a b) c"),
        ("b (g r) s, b g -> b s", [(2, 8, 6), (2, 4)], None, {}, "b=2 g=4 r=2 s=6", "b (g r) s, b g -> b s"),
        ("b.. d -> (b.. d)", [(2, 3, 4)], None, {}, "b0=2 b1=3 d=4", "b0 b1 d -> (b0 b1 d)"),
        (LAYER_NORM, [(2, 4, 6), (6,), (6,)], [(2, 4, 6), (2, 4, 1), (2, 4, 1)], {}, "b0=2 b1=4 n0=6*",
         "b0 b1 n0, n0, n0 -> b0 b1 n0, b0 b1 _, b0 b1 _"),
        (LAYER_NORM, [(2, 4, 6), None, None], [(2, 4, 6), (2, 1, 1), (2, 1, 1)], {"n": (4, 6)}, "b0=2 n0=4* n1=6*",
         "b0 n0 n1, -, - -> b0 n0 n1, b0 _ _, b0 _ _"),
        (LAYER_NORM + " ; normalized_shape=(n..)", [(2, 6), None, None], [(2, 6), (2, 1), None],
         {"normalized_shape": [6]}, "b0=2 n0=6*", "b0 n0, -, - -> b0 n0, b0 _, -"),
        ("{x0 _} -> x0 _", [[(4, 2), (4, 3)]], [(4, 5)], {}, "x0=4", "{x0 _; x0 _} -> x0 _"),
        ("{x..}, {y} -> x..", [[None, (4, 2)], []], [(4, 2)], {}, "x0=4 x1=2", "{-; x0 x1}, {} -> x0 x1"),
        ("[n] x -> {x}", [(2, 5)], [[(5,), (5,)]], {}, "n=2* x=5", "n x -> {x; x}"),
        ("a 1 -> a", [(3, 1)], None, {}, "a=3", "a _ -> a"),
        ("[a] [a] -> [a]", [(4, 4)], None, {}, "a=4*", "a a -> a"),
        ("x.., x.. -> x.. ; ragged", [(8, 5), (8, 3)], [(8, 3)], {}, "x0=8 x1=5*", "x0 x1, x0 x1 -> x0 x1"),
        ("a k -> a, a k ; reduce none", [(4, 6)], None, {}, "a=4 k=6*", "a k -> a, a k"),
        ("a k -> a ; reduce none ; kernel k", [(4, 6)], None, {}, "a=4 k=6", "a k -> a"),
        ("-> ; linear 0", [()], None, {}, "", " -> "),
        ("-> a b ; size=(a b)", [()], None, {"size": [4, 5]}, "a=4 b=5", " -> a b"),
        ("-> a b ; size=(a b)", [], None, {"size": [4, 5]}, "a=4 b=5", " -> a b"),
        ("a, b.. -> a", [(4,), None], None, {}, "a=4", "a, - -> a"),
    ],
)  # fmt: skip
def test_table(text: str, inputs: Any, outputs: Any, given: Any, factors: str, dims: str) -> None:
    bound = bind(parse(text), inputs, outputs, given)
    assert sizes(bound) == factors

    def side(arguments: Any) -> str:
        def one(argument: Any) -> str:
            if argument is None:
                return "-"
            return named(bound, argument) if hasattr(argument, "dims") else f"{{{'; '.join(map(one, argument))}}}"

        return ", ".join(map(one, arguments))

    assert f"{side(bound.inputs)} -> {side(bound.outputs)}" == dims


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "given", "message"),
    [
        ("m k, k n -> m n", [(4, 6), (5, 8)], None, {}, "factor k has size 6 and, in operand 1, size 5 in the rule"),
        ("m k -> m", [(4, 6)], [(5,)], {}, "factor m has size 4 and, in output 0, size 5"),
        ("m k -> m", [(4, 6)], None, {"m": 3}, "factor m has size 3 and, in operand 0, size 4"),
        ("{m} -> m", [[(4,), (5,)]], None, {}, "factor m has size 4 and, in operand 0[1], size 5"),
        ("b?.., b?.. -> b..", [(4,), (3,)], None, {}, "factor b0 has size 4 and, in operand 1, size 3"),
        ("m k, k n -> m n", [(4, 6), (6,)], None, {}, "operand 1 has 1 dims, but its pattern is 'k n' in"),
        ("m k, k n -> m n", [(4, 6), (6, 1, 1)], None, {}, "operand 1 has 3 dims, but its pattern is 'k n' in"),
        ("m n?, n -> m n", [(6,), (6,)], None, {}, "operand 0 has 1 dims, but its pattern is 'm n?' in the rule"),
        ("x.., x.. -> x..", [(4, 6), (6,)], None, {}, "operand 1 has 1 dims"),
        ("x.. -> x..", [(4, 6)], [(4,)], {}, "output 0 has 1 dims"),
        ("m k, k n -> m n", [(4, 6)], None, {}, "1 operands for the rule m k, k n -> m n: pass 2"),
        ("-> a ; size=(a)", [(4,)], None, {}, "operand 0 has 1 dims"),
        ("m -> m", [(4,)], [(4,), (4,)], {}, "2 outputs for the rule m -> m: pass 1"),
        ("(a b) -> a b", [(24,)], None, {}, "the size of factor a or b does not follow from the shapes"),
        ("(a b) -> a b", [(24,)], None, {"a": 5}, "operand 0 has a dim of size 24 that is not a=5 times"),
        ("(a b) -> a b", [(24,)], [(4, 5)], {}, "operand 0 has a dim of size 24 that is not a=4 b=5 in the rule"),
        ("a 1 -> a", [(4, 2)], None, {}, "operand 0 has a dim of size 2 that is not a dim of size 1"),
        ("[v], i -> i [w]", [(4,), (3,)], None, {}, "the size of factor w does not follow from the shapes"),
        (LAYER_NORM, [(2, 6), None, None], [(2, 6), (2, 1), (2, 1)], {}, "the number of dims of b.. and n.. does not"),
        (LAYER_NORM, [(2, 4, 6), (6,), (6,)], None, {}, "cannot infer the shape of output 1"),
        ("[n] x -> {x}", [(2, 5)], None, {}, "the rule [n] x -> {x} returns a list of unknown length"),
        ("x.., x.. -> x.. ; ragged", [(8, 5), (8, 3)], None, {}, "factor x1 has several sizes"),
        (PAIR, [(4, 6)], None, {"size": [4]}, "argument size is [4], which does not fit the rule"),
        (PAIR, [(4, 6)], None, {"size": [4, 5]}, "factor b has size 6 and, in argument size"),
    ],
)  # fmt: skip
def test_refusals(text: str, inputs: Any, outputs: Any, given: Any, message: str) -> None:
    with pytest.raises(BindError) as caught:
        bind(parse(text), inputs, outputs, given)
    assert str(caught.value).startswith(message)
    assert text in str(caught.value)
    assert caught.value.fix


def test_ragged_may_be_asked_for_at_the_call() -> None:
    rule = parse("x.., x.. -> x..")
    with pytest.raises(BindError):
        bind(rule, [(8, 5), (4, 5)], [(4, 5)])
    assert sizes(bind(rule, [(8, 5), (4, 5)], [(4, 5)], ragged=True)) == "x0=8* x1=5"


def test_an_absent_operand_leaves_the_sets_it_is_in() -> None:
    rule = parse("m k, k n, n? -> m n ; linear 0+2 | 1+2")
    assert bind(rule, [(4, 6), (6, 8), (8,)]).linear == ((0, 2), (1, 2))
    assert bind(rule, [(4, 6), (6, 8), None]).linear == ((0,), (1,))


def test_layouts_of_cut_operands_and_outputs() -> None:
    bound = bind(parse("b (g r) s, b g -> b (g r)"), [(2, 8, 6), (2, 4)])
    b, g, r, s = (bound.factor(name) for name in "bgrs")

    def layouts(*shardings: tuple[int, int]) -> str:
        operands = [sharded_layout(tensor, bound, (2, 2), shardings) for tensor in bound.inputs]
        return " ".join(map(repr, [*operands, output_layout(bound.outputs[0], bound, 0, (2, 2), shardings)]))

    assert layouts() == "Layout[2, 8, 6] Layout[2, 4] Layout[2, 8]"
    assert layouts((0, b)) == "Layout[2@0, 8, 6] Layout[2@0, 4] Layout[2@0, 8]"
    assert layouts((0, g), (1, r)) == "Layout[2, (4@0 2@1), 6] Layout[2, 4@0] Layout[2, (4@0 2@1)]"
    assert layouts((1, g), (0, g)) == "Layout[2, 8@1,0, 6] Layout[2, 4@1,0] Layout[2, 8@1,0]"
    assert layouts((1, s), (0, r)) == "Layout[2, (4 2@0), 6@1] Layout[2, 4] Layout[2, (4 2@0)] sum(1)"


def test_partial_outputs() -> None:
    bound = bind(parse("a k -> a, k, 1 ; reduce max, sum, none ; kernel a, k"), [(4, 6)])
    shardings = ((1, 0), (0, 1))
    assert [output_partial(bound, i, shardings) for i in range(3)] == [((0, "max"),), ((1, "sum"),), ()]
    listed = bind(parse("n x -> {x}"), [(2, 5)], [[(5,), (5,)]])
    assert output_partial(listed, 0, ((0, 0),)) == ((0, "sum"),)


def test_cuts_that_a_rule_forbids() -> None:
    bound = bind(parse("a [b] -> a [b]"), [(4, 6)])
    with pytest.raises(
        BindError, match=r"axis 0 cannot shard b, which must be replicated in a=4 b=6: a \[b\] -> a \[b\]"
    ):
        sharded_layout(bound.inputs[0], bound, (2,), ((0, 1),))
    with pytest.raises(BindError, match="an axis occurs twice"):
        sharded_layout(bound.inputs[0], bound, (2,), ((0, 0), (0, 0)))
    with pytest.raises(BindError, match="no factor z in a=4 b=6"):
        bound.factor("z")


def test_partial_operands_that_pass() -> None:
    bound = bind(parse("a?, a? -> a ; linear 0 | 0+1 ; monotone 1 ; antitone 0"), [(4,), (4,)])
    assert passes(bound, "sum") == (((0,), "sum"), ((0, 1), "sum"))
    assert passes(bound, "avg") == (((0,), "avg"), ((0, 1), "avg"))
    assert passes(bound, "max") == (((1,), "max"), ((0,), "min"))
    assert passes(bound, "min") == (((1,), "min"), ((0,), "max"))
    assert passes(bound, "product") == ()
    maximum = bind(parse("a k -> a ; monotone 0 ; reduce max"), [(4, 6)])
    assert (passes(maximum, "max"), passes(maximum, "min")) == ((((0,), "max"),), ())


@pytest.mark.parametrize(
    ("text", "shape", "argument", "cut", "by_rank"),
    [
        (SPLIT, (24, 8), (4, 48), "a", [[2, 48], [2, 48], [0, 48]]),
        (SPLIT, (24, 8), (4, -1), "b", [[4, 16], [4, 16], [4, 16]]),
        (SPLIT, (24, 8), (-1, 48), "c", [[4, 18], [4, 18], [4, 12]]),
        ("a -> n a ; size=(n 1 _ a)", (5,), (4, 1, 7, -1), "n", [[2, 1, 7, 5], [2, 1, 7, 5], [0, 1, 7, 5]]),
        ("a -> a n ; times=(n)", (5,), 4, "n", [2, 2, 0]),
    ],
)
def test_local_sizes(text: str, shape: Any, argument: Any, cut: str, by_rank: Any) -> None:
    rule = parse(text)
    name = rule.size_arguments[0].name
    outputs = [(5, 4)] if name == "times" else [(4, 5)] if "n 1" in text else [(4, 48)]
    bound = bind(rule, [shape], outputs, {name: argument})
    shardings = ((0, bound.factor(cut)),)
    assert [local_size(bound, name, argument, (3,), shardings, (rank,)) for rank in range(3)] == by_rank


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("b?.., b?.. -> b.. ; linear 0+1", [(4, 6), (6,)], [(4, 6)]),
        ("m k, k n -> m n ; linear 0 | 1", [(4, 6), (6, 8)], [(4, 8)]),
        (LAYER_NORM, [(2, 4, 6), (6,), (6,)], [(2, 4, 6), (2, 4, 1), (2, 4, 1)]),
    ],
)
def test_a_new_batch_size_is_cheap(text: str, inputs: Any, outputs: Any) -> None:
    rule = parse(text)
    bind(rule, inputs, outputs)
    misses = make_frame.cache_info().misses
    times = []
    for batch in range(2, 200):
        shapes = [[(batch, *s[1:]) if len(s) == len(inputs[0]) else s for s in side] for side in (inputs, outputs)]
        if text.startswith("m k"):
            shapes = [[(batch, 6), (6, 8)], [(batch, 8)]]
        start = time.perf_counter()
        bind(rule, *shapes)
        times.append(time.perf_counter() - start)
    assert make_frame.cache_info().misses == misses
    assert min(times) < 60e-6


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "kinds"),
    [
        ("m k, k n -> m n", [(4, 6), (6, 8)], [(4, 8)], "m pass-through, k reduced, n pass-through"),
        ("a [b] -> a", [(4, 6)], [(4,)], "a pass-through, b must be replicated"),
        ("a k -> a, k ; reduce max, sum", [(4, 6)], [(4,), (6,)], "a reduced, k reduced"),
        ("a k -> a ; reduce none", [(4, 6)], [(4,)], "a pass-through, k must be replicated"),
        ("a k -> a ; reduce none ; kernel k", [(4, 6)], [(4,)], "a pass-through, k handled by a kernel"),
        ("a k -> a k, _ ; reduce sum, same", [(4, 6)], [(4, 6), (3,)], "a pass-through, k pass-through"),
        ("x.. -> _ ; unread", [(4, 6)], [(3,)], "x0 pass-through, x1 pass-through"),
        ("a b -> a ; reduce same", [(4, 6)], [(4,)], "a pass-through, b pass-through"),
        ("x.., x.. -> x.. ; ragged", [(8, 5), (8, 3)], [(8, 3)], "x0 pass-through, x1 must be replicated"),
        ("a -> a ; kernel a", [(5,)], [(3,)], "a handled by a kernel"),
    ],
)
def test_every_factor_has_a_kind(text: str, inputs: Any, outputs: Any, kinds: str) -> None:
    bound = bind(parse(text), inputs, outputs)
    assert ", ".join(f"{factor.name} {factor.kind.value}" for factor in bound.factors) == kinds
    for factor in bound.factors:
        assert factor.must_replicate == (factor.kind is FactorKind.REPLICATED)
        assert factor.handled_by_kernel == (factor.kind is FactorKind.KERNEL)


def test_split_factors_keep_their_kind() -> None:
    bound = bind(parse("m k -> m"), [(10, 6)])
    layout = Layout.make((2,), ((Factor(10, ()),), (Factor(2, ()), Factor(3, (0,)))))
    refined = refine(bound, [(bound.inputs[0], layout)])
    assert [(factor.name, factor.kind) for factor in refined.factors] == [
        ("m", FactorKind.PASS_THROUGH),
        ("k_0", FactorKind.REDUCED),
        ("k_1", FactorKind.REDUCED),
    ]


def test_factors_are_split_where_a_layout_begins_inside_them() -> None:
    bound = bind(parse("(a b) c -> a b c ; a=12"), [(24, 3)], [(12, 2, 3)])
    blocks = Layout.make((3,), ((Factor(4, ()), Factor(6, (0,))), (Factor(3, ()),)))
    assert repr(refine(bound, [(bound.inputs[0], blocks)])).startswith("a_0=4 a_1=3 b=2 c=3")
    across = Layout.make((3,), ((Factor(8, ()), Factor(3, (0,))), (Factor(3, ()),)))
    assert refine(bound, [(bound.inputs[0], across)]) is bound  # 12 and 2 do not split at 8
