"""A built-in rule that is registered again, word for word, changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Partial, Placement, Shard
from shardwise.ops.call import Call
from shardwise.ops.registry import registry
from tests.ops.helpers import on, r, ranks, whole

CASES: dict[str, tuple[str, Callable[[Any], Tensor]]] = {
    "squeeze in place": ("aten::squeeze", lambda x: x.unsqueeze(0).squeeze_(0)),
    "transpose in place": ("aten::transpose.int", lambda x: x.clone().transpose_(0, 1)),
    "unsqueeze in place": ("aten::unsqueeze", lambda x: x.clone().unsqueeze_(1)),
    "elements at an offset in memory": ("aten::as_strided", lambda x: x[2:].as_strided((2, 3), (12, 1), 5)),
    "norms of a list": ("aten::_foreach_norm", lambda x: torch._foreach_norm([x, x], 2)[0]),
    "a range that is a number": ("aten::histc", lambda x: x.histc(4, -1.0, 1.0) + x.histc(4, -2.0, 2.0)),
    "padding that is a number": ("aten::constant_pad_nd", lambda x: torch.constant_pad_nd(x, (1, 1), 2.0)),
    "mean of a dim": ("aten::mean.dim", lambda x: x.mean(0)),
    "phases of a conjugate": ("aten::_conj", lambda x: torch.complex(x, x).conj()[2:].as_strided((3,), (1,), 1).imag),
    "maximum of two": ("aten::maximum", lambda x: torch.maximum(x, x.t().contiguous().t())),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_nothing_changes(case: str, placement: Placement) -> None:
    name, fn = CASES[case]

    def run(mesh: Any) -> tuple[str, tuple[int, ...], Tensor]:
        y: Any = fn(on(mesh, r(8, 12), placement))
        return str(y.spec), y.stride(), whole(y)

    with ranks(4) as mesh, registry.restored():
        spec, stride, value = run(mesh)
        rule = registry._built_in_for(name)
        assert rule is not None
        assert rule.rule is not None
        registry.register(name, rule.rule)
        spec_again, stride_again, value_again = run(mesh)
        assert (spec_again, stride_again) == (spec, stride)
        torch.testing.assert_close(value_again, value)


IN_PLACE: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "running sum": (torch.ops.aten.cumsum_.default, lambda x: x.clone().cumsum_(0)),
    "running product": (torch.ops.aten.cumprod_.default, lambda x: x.clone().cumprod_(1)),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial("avg")], ids=str)
@pytest.mark.parametrize("case", IN_PLACE)
def test_a_variant_has_the_kernels_of_its_op(case: str, placement: Placement) -> None:
    """The rule of one call of an in-place variant, as text, names a kernel of the op that it is a variant of."""
    func, fn = IN_PLACE[case]
    with ranks(4) as mesh, registry.restored():
        expected = whole(fn(on(mesh, r(8, 12), placement)))
        found = registry.resolve(func)
        dim = {"running sum": 0, "running product": 1}[case]
        registry.register(func, str(found.rule(Call.make(func, (r(8, 12), dim), {}, found.operands))))
        torch.testing.assert_close(whole(fn(on(mesh, r(8, 12), placement))), expected)


@pytest.mark.parametrize("rule", ["a b -> a b", "a [b] -> a [b]", "x.. -> x.."])
def test_random_numbers_do_not_depend_on_the_rule(rule: str) -> None:
    """Ranks draw numbers of one global tensor by any rule; ranks outside the mesh draw, too, to stay in step."""
    with ranks(4) as mesh, registry.restored():

        def numbers() -> Tensor:
            torch.manual_seed(0)
            return whole(on(mesh, r(8, 12), Shard(0)).normal_())

        expected = numbers()
        registry.register("aten::normal_", rule)
        assert torch.equal(numbers(), expected)
        assert registry["aten::normal_"].draw is not None
