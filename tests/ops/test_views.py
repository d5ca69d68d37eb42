"""Computed rules of reshapes, against torch.reshape on every shard."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.notation import RuleError, bind, parse, view_rule
from tests.notation.brute import check_shardings, shardable


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ((4, 6, 8), (24, 8), "a b c -> (a b) c ; size=((a b) c)"),
        ((24, 8), (4, 6, 8), "(a b) c -> a b c ; size=(a b c)"),
        ((24, 8), (4, 48), "(a b) c -> a (b c) ; size=(a (b c))"),
        ((8, 4, 5), (2, 16, 5), "(a b) c d -> a (b c) d ; size=(a (b c) d)"),
        ((4, 1, 6), (4, 6), "a 1 b -> a b ; size=(a b)"),
        ((4, 6), (1, 4, 6, 1), "a b -> 1 a b 1 ; size=(1 a b 1)"),
        ((6, 4), (4, 6), "(a [b]) [c] -> (a [d]) [e] ; a=2 ; size=((a d) e)"),
        ((6, 4, 5), (4, 6, 5), "(a [b]) [c] d -> (a [e]) [f] d ; a=2 ; size=((a e) f d)"),
        ((2, 3, 8), (3, 4, 4), "[a] [b] [c] -> [d] [e] [f] ; size=(d e f)"),
        ((12,), (2, 3, 2), "(a b c) -> a b c ; size=(a b c)"),
        ((), (1, 1), "-> 1 1 ; size=(1 1)"),
        ((1,), (), "1 -> ; size=()"),
        ((7,), (7,), "a -> a ; size=(a)"),
        ((1, 2, 4), (1, 8), "a b c -> a (b c) ; size=(a (b c))"),
        ((6, 1, 4), (2, 3, 1, 4), "(a b) c d -> a b c d ; size=(a b c d)"),
        ((4, 0, 3), (4, 0), "a b [c] -> a b ; size=(a b)"),
        ((0, 4), (2, 0), "[a] [b] -> [c] [d] ; size=(c d)"),
    ],
)
def test_texts(old: tuple[int, ...], new: tuple[int, ...], text: str) -> None:
    assert view_rule(old, new) == text
    bound = bind(parse(text), [old], [new])
    assert bind(parse(view_rule(old, new, None)), [old], [new]).factors == bound.factors


def test_the_same_text_serves_every_batch_size() -> None:
    assert {view_rule((batch, 6, 8), (batch * 6, 8)) for batch in (2, 3, 5, 64)} == {view_rule((4, 6, 8), (24, 8))}


def test_shapes_of_different_sizes() -> None:
    with pytest.raises(RuleError, match=r"\[4, 6\] cannot be viewed as \[5\]"):
        view_rule((4, 6), (5,))


def factorisations(numel: int, longest: int) -> list[tuple[int, ...]]:
    divisors = [d for d in range(1, numel + 1) if numel % d == 0]
    return [
        shape
        for length in range(1, longest + 1)
        for shape in itertools.product(divisors, repeat=length)
        if math.prod(shape) == numel and shape.count(1) <= 1
    ]


def check_view(old: tuple[int, ...], new: tuple[int, ...], pieces: tuple[int, ...] = (2, 3, 4)) -> int:
    rule = parse(view_rule(old, new))
    arguments = {rule.size_arguments[0].name: new}
    bound = bind(rule, [old], [new], arguments)
    assert bind(rule, [old], sizes=arguments) == bound
    x = torch.arange(math.prod(old)).view(old)
    reshape = lambda x, size: x.reshape(size)  # noqa: E731
    count = 0
    for n in pieces:
        for factor in shardable(bound, n):
            check_shardings(rule, reshape, [x], arguments, bound, (n,), ((0, factor),))
            count += 1
    return count


@pytest.mark.parametrize("numel", [6, 7, 12, 18])
def test_every_pair_of_shapes(numel: int) -> None:
    shapes = factorisations(numel, 3)
    assert sum(check_view(old, new, (2, 3)) for old, new in itertools.product(shapes, shapes)) > len(shapes)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_generated_pairs(sizes: list[int], random: object) -> None:
    primes = [p for size in sizes for p in prime_factors(size)]
    random.shuffle(primes)  # type: ignore[attr-defined]
    cut = sorted(random.randint(0, len(primes)) for _ in range(2))  # type: ignore[attr-defined]
    new = tuple(math.prod(part) for part in (primes[: cut[0]], primes[cut[0] : cut[1]], primes[cut[1] :]))
    check_view(tuple(sizes), new)
    check_view(new, tuple(sizes))


def prime_factors(size: int) -> list[int]:
    return next(([p, *prime_factors(size // p)] for p in (2, 3, 5) if size % p == 0), [])


def test_two_axes_on_a_view() -> None:
    rule = parse(view_rule((4, 6, 5), (24, 5)))
    bound = bind(rule, [(4, 6, 5)], [(24, 5)])
    x = torch.arange(120).view(4, 6, 5)
    for first, second in itertools.product(range(3), repeat=2):
        cuts = ((1, first), (0, second))
        check_shardings(rule, lambda x, size: x.reshape(size), [x], {"size": (24, 5)}, bound, (2, 3), cuts)
