"""The names of the methods that PyTorch calls on the node of a symbolic integer."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise._torch.symint import NumberNode, make_symint, node_of
from shardwise._torch.wrapper import make_wrapper, no_torch_function


class Boxed(NumberNode):
    """A plain number in a node, which says that it is no constant so that PyTorch asks it everything."""

    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number

    def is_int(self):
        return type(self.number) is int

    def is_float(self):
        return type(self.number) is float

    def is_bool(self):
        return type(self.number) is bool

    def is_constant(self):
        return False

    def maybe_as_int(self):
        return None

    def wrap_int(self, number):
        return Boxed(number)

    def apply(self, operation):
        return Boxed(operation(self.number))

    def combine(self, operation, other):
        return Boxed(operation(self.number, other.number))

    compare = combine

    def value(self, what):
        return self.number

    def always(self):
        return bool(self.number)

    def possibly(self):
        return bool(self.number)

    def is_dense(self, order, sizes, strides):
        sizes, strides = ([n.number if isinstance(n, Boxed) else n for n in numbers] for numbers in (sizes, strides))
        expected = 1
        for dim in sorted(range(len(sizes)), key=strides.__getitem__) if order is None else order:
            if strides[dim] != expected:
                return False
            expected *= sizes[dim]
        return True

    def __str__(self):
        return f"<{self.number}>"


def boxed(number: int) -> torch.SymInt:
    return make_symint(Boxed(number))


def number_of(symbolic: object) -> object:
    node = node_of(symbolic)
    assert isinstance(node, Boxed), symbolic
    return node.number


class Wrapper(torch.Tensor):
    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_only_symbolic_numbers_have_a_node() -> None:
    assert number_of(boxed(3)) == 3
    assert node_of(3) is None
    assert node_of("3") is None


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("n + 1", 8),
        ("1 + n", 8),
        ("n - 1", 6),
        ("10 - n", 3),
        ("n * 2", 14),
        ("n % 4", 3),
        ("n // 2", 3),
        ("n / 2", 3.5),
        ("n**2", 49),
        ("-n", -7),
        ("torch.sym_min(n, 5)", 5),
        ("torch.sym_max(n, 9)", 9),
        ("torch.sym_float(n)", 7.0),
        ("torch.sym_int(torch.sym_float(n))", 7),
        ("torch.sym_sum([n, n, 1])", 15),
        ("torch.sym_not(n > 3)", False),
        ("(n > 3) & (n < 5)", False),
        ("(n > 3) | (n < 5)", True),
        ("math.floor(n / 2)", 3),
        ("math.ceil(n / 2)", 4),
        ("math.trunc(n / 2)", 3),
    ],
)
def test_arithmetic_arrives_at_the_node(code, want) -> None:
    got = number_of(eval(code, {"torch": torch, "math": math, "n": boxed(7)}))
    assert (got, type(got)) == (want, type(want))


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("n == 7", True),
        ("n != 7", False),
        ("n < 8", True),
        ("n > 8", False),
        ("n <= 7", True),
        ("n >= 8", False),
    ],
)
def test_comparisons_arrive_at_the_node(code, want) -> None:
    answer = eval(code, {"n": boxed(7)})
    assert number_of(answer) is want
    assert bool(answer) is want


def test_the_plain_number_is_taken_from_the_node() -> None:
    n = boxed(7)
    assert int(n) == 7
    assert list(range(n)) == list(range(7))
    assert repr(n) == "<7>"
    assert float(torch.sym_float(n)) == 7.0


def test_a_wrapper_of_symbolic_sizes_asks_the_node_about_its_layout() -> None:
    def wrapper(shape, stride):
        return make_wrapper(Wrapper, [boxed(n) for n in shape], [boxed(n) for n in stride], dtype=torch.float32)

    rows = wrapper((2, 3), (3, 1))
    assert [number_of(n) for n in rows.shape] == [2, 3]
    assert number_of(rows.numel()) == 6
    assert rows.is_contiguous()
    assert not wrapper((2, 3), (1, 2)).is_contiguous()
    images = wrapper((2, 3, 4, 5), (60, 1, 15, 3))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert not images.is_contiguous()
    volumes = wrapper((2, 3, 4, 5, 6), (360, 1, 90, 18, 3))
    assert volumes.is_contiguous(memory_format=torch.channels_last_3d)
