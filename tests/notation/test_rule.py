"""Reading and printing rules, and refusing wrong ones."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.notation import RuleError, parse, without_operands

CANONICAL = """
m k, k n -> m n
m? n?, m k, k n -> m n
x.. -> x..
b.. [n..], [n..], [n..] -> b.. [n..], b.. _.., b.. _..
v d, i.. -> i.. d
b h s [d], b h [t] [d], b h [t] [e] -> b h s [e], b h s
b (g r) s [d], b g [t] [d], b g [t] [e] -> b (g r) s [e]
x.. -> x.., x..
x.., x.. -> x..
(a b) c -> a (b c)
a? b?, a? b? -> a b ; linear 0+1
m k, k n -> m n ; linear 0 | 1
m? n?, m k, k n -> m n ; linear 0+1 | 0+2
n c [h] [w] -> n c [y] [x] ; input_size=(n c y x)
(a b) c -> a (b c) ; size=(a (b c))
{x..} -> x..
x.. [n] -> {x..}
b?.., b?.. -> b.. ; linear 0+1
[m?] [n?..], [m] [n..] -> [m] [n..]
(g [r]) -> g [r]
b.. d -> (b.. d)
a 1 -> 1 a
[a] [a] -> [a]
n [c], n, [c] -> ,
, a -> a
a b ->
-> a b ; size=(a b)
-> a.. ; size=(a..)
{} -> {}
a k -> a ; monotone 0 ; reduce max
a? -> a ; antitone 0
a k -> a, a, a 1 ; reduce sum, max, none
a k -> a, _ ; reduce sum, same
x.., x.. -> x.. ; ragged
x.. -> _ _ ; unread
(a b) -> (a [c]) ; a=2 ; size=((a c))
i.. d, i.. -> v d ; num_weights=(v) ; kernel v
a b -> a b ; linear 0 ; monotone 0 ; antitone 0 ; reduce avg ; ragged ; a=2 ; p=(a) ; q=(2 _ b) ; kernel a, b
""".strip("\n").splitlines()


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_text_prints_back(text: str) -> None:
    rule = parse(text)
    assert str(rule) == text
    assert repr(rule) == f"Rule({text!r})"
    assert parse(str(rule)) is rule


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("m k,k n->m n;linear 1|0", "m k, k n -> m n ; linear 0 | 1"),
        ("a, a -> a ; linear all", "a, a -> a ; linear 0+1"),
        ("{a} -> a ; linear all", "{a} -> a ; linear 0"),
        ("a, a -> a ; linear 1+0+1 | 0+1", "a, a -> a ; linear 0+1"),
        ("a b -> a, b ; reduce max, max", "a b -> a, b ; reduce max"),
        ("a b -> a ; reduce sum", "a b -> a"),
        ("a b -> a b ; kernel b, a ; linear 0", "a b -> a b ; linear 0 ; kernel a, b"),
        ("(a) () -> (a) ; q=((a)) ; p=(a)", "a 1 -> a ; p=(a) ; q=(a)"),
        ("b ? .. -> b ..", "b?.. -> b.."),
    ],
)
def test_other_spellings_are_the_same_rule(text: str, canonical: str) -> None:
    assert parse(text) is parse(canonical)
    assert str(parse(text)) == canonical


def test_rules_are_values() -> None:
    rule = parse("m k, k n -> m n ; linear 0 | 1")
    assert pickle.loads(pickle.dumps(rule)) is rule
    assert copy.deepcopy(rule) is rule
    assert len({rule, parse(str(rule))}) == 1
    with pytest.raises(AttributeError):
        rule.text = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("m k, k n", 8, "expected '->', found the end"),
        ("a -> b -> a", 7, "unexpected '->'"),
        ("a (b -> a b", 2, "'(' is not closed"),
        ("a [b -> a b", 2, "'[' is not closed"),
        ("{a -> a", 0, "'{' is not closed"),
        ("a) -> a", 1, "expected '->', found ')'"),
        ("[a b] -> a", 0, "'[' is not closed"),
        ("[(a b)] -> a", 1, "expected a name, found '('"),
        ("a % b -> a", 2, "unexpected character '%'"),
        ("_x -> _x", 0, "unexpected character '_'"),
        ("2 a -> a", 0, "a dim of size 2"),
        ("[_] -> a", 1, "[_] marks a dim without a factor"),
        ("_? -> a", 0, "_? marks a dim without a factor"),
        ("(a b?) -> a b", 3, "b? broadcasts inside a compound dim"),
        ("a -> a?", 5, "a? in an output"),
        ("a -> [a]", 6, "a must be replicated in one place and not in another"),
        ("a, a.. -> a", 3, "a is one dim in one place and an ellipsis in another"),
        ("a a -> a", 2, "a twice in one tensor"),
        ("(a a) -> a", 3, "a twice in one tensor"),
        ("a.. a.. -> a..", 4, "a twice in one tensor"),
        ("x.., x1 -> x..", 5, "x1 is also a dim of x.."),
        ("_.. a _.. -> a", 6, "a second _.. in one tensor"),
        ("a -> a b", 7, "only an output has the factor b"),
        ("a -> a ; parallel 0", 9, "unknown clause 'parallel'"),
        ("a -> a ; linear 0 ; linear 0", 20, "a second clause 'linear'"),
        ("a -> a ; linear 1", 16, "there is no operand 1"),
        ("a -> a ; linear", 15, "expected a number, found the end"),
        ("a -> a ; reduce mean", 16, "unknown reduction 'mean'"),
        ("a -> a ; reduce sum, max", 9, "2 reductions for 1 outputs"),
        ("a -> a ; kernel b", 16, "no tensor has the factor b"),
        ("[a] -> [a] ; kernel a", 13, "a must be replicated and has a kernel"),
        ("a.. -> a.. ; kernel a..", 20, "a.. in a kernel clause"),
        ("a -> a ; size=(b)", 15, "no tensor has the factor b"),
        ("a.. -> a.. ; size=(a)", 19, "a is written differently in the tensors"),
        ("a -> a ; size=(a", 14, "'(' is not closed"),
        ("a -> a ; size=((a?))", 16, "a? broadcasts inside a compound dim"),
        ("a -> a ; size=(a?)", 15, "a? in a size argument"),
        ("a -> a ; a=(a)", 9, "a is an argument and a factor"),
        ("a -> a ; size=2", 9, "size is not a factor"),
        ("a -> a ; size=a", 14, "expected '(', found 'a'"),
        ("a -> a ; 3", 9, "expected a name, found '3'"),
        ("a -> a ; linear 0 1", 18, "unexpected '1'"),
    ],
)
def test_wrong_rules_are_refused_where_they_are_wrong(text: str, position: int, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{message}, at position {position} of the rule {text!r}: ")
    assert caught.value.position == position
    assert caught.value.fix
    assert isinstance(caught.value, ShardwiseError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "dropped", "left"),
    [
        ("b?.., b?.. -> b.. ; linear 0+1", {1}, "b?.. -> b.."),
        ("b?.., b?.. -> b.. ; linear 0 | 1", {1}, "b?.. -> b.. ; linear 0"),
        ("b?.., b?.. -> b.. ; linear 0 | 1", {0}, "b?.. -> b.. ; linear 0"),
        ("a?, a?, a? -> a ; linear 1+2 ; monotone 0 | 2", {0}, "a?, a? -> a ; linear 0+1 ; monotone 1"),
        ("a?, [b] -> a ; reduce max ; n=(a)", {1}, "a? -> a ; reduce max ; n=(a)"),
    ],
)
def test_numbers_in_the_place_of_operands(text: str, dropped: set[int], left: str) -> None:
    assert str(without_operands(parse(text), frozenset(dropped))) == left


# ---- generated rules --------------------------------------------------------------------------------------------

NAMES = ["a", "b", "c1", "kv", "m"]


@st.composite
def rule_texts(draw: st.DrawFn) -> str:
    """Texts of right rules, with odd spacing and clauses in any order."""
    kinds = {name: draw(st.sampled_from(["{}", "[{}]", "{}..", "[{}..]"])) for name in NAMES}
    space = st.sampled_from([" ", "  "])

    def tensor(names: list[str], broadcast: bool) -> str:
        dims: list[str] = []
        for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=4)) if names else []:
            mark = "?" if broadcast and draw(st.booleans()) else ""
            dims.append(kinds[name].format(name + mark))
        if not any("?" in dim for dim in dims) and len(dims) > 1 and draw(st.booleans()):
            dims[:2] = [f"({' '.join(dims[:2])})"]
        dims.insert(draw(st.integers(0, len(dims))), draw(st.sampled_from(["_", "1", "_.."])))
        text = draw(space).join(dims)
        return f"{{{text}}}" if draw(st.booleans()) else text

    inputs = [tensor(NAMES, True) for _ in range(draw(st.integers(1, 3)))]
    known = [name for name in NAMES if any(name in text for text in inputs)]
    outputs = [tensor(known, False) for _ in range(draw(st.integers(1, 2)))]
    positions = st.integers(0, len(inputs) - 1)
    sets = st.lists(st.lists(positions, min_size=1).map(lambda s: "+".join(map(str, s))), min_size=1, max_size=3)
    clauses = [draw(st.sampled_from(["", f"linear {' | '.join(draw(sets))}"])), draw(st.sampled_from(["", "ragged"]))]
    clauses.append(draw(st.sampled_from(["", "reduce max", "reduce none"])))
    if known:
        entry = draw(st.sampled_from(known))
        clauses.append(f"size=({entry}{'..' if '..' in kinds[entry] else ''} _ 3)")
    order = draw(st.permutations([clause for clause in clauses if clause]))
    sides = f"{' ,'.join(inputs)}{draw(space)}->{', '.join(outputs)}"
    return " ;".join([sides, *order])


@given(rule_texts())
def test_generated_rules_print_back(text: str) -> None:
    rule = parse(text)
    assert parse(str(rule)) is rule
    assert str(parse(str(rule))) == str(rule)
    assert str(rule).split() == " ".join(str(rule).split()).split(" ")


@given(st.text(alphabet="ab[](){}.,?_1;=->|+ ", max_size=24))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        rule = parse(text)
    except RuleError:
        return
    assert parse(str(rule)) is rule
