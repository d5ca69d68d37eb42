"""Ops whose derivative formulas make plain tensors: forward, backward and gradients of gradients as on one device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Partial, Placement, Replicate, Shard
from tests.ops.helpers import on, r, ranks, whole

X = r(4, 6, dtype=torch.float64).abs() + 1.5
ZEROS = X.masked_fill(X > 2.5, 0.0)
SQUARE = r(4, 4, dtype=torch.float64)
INDEX = torch.tensor([[0, 3], [1, 2]])


def in_place(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def fn(x: Any) -> Any:
        y = x * 1
        write(y)
        return y

    return fn


def sum_of_scatter(x: Any) -> Any:
    return torch.slice_scatter(x, x[:2] * 2, 0, 1, 3).sum() * x


CASES: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "prod": (torch.prod, X),
    "prod with zeros": (torch.prod, ZEROS),
    "prod over a dim": (lambda x: x.prod(1), X),
    "prod over a dim with zeros": (lambda x: x.prod(0), ZEROS),
    "cumprod": (lambda x: x.cumprod(0), X),
    "cumprod with zeros": (lambda x: x.cumprod(1), ZEROS),
    "cumprod in place": (in_place(lambda y: y.cumprod_(0)), X),
    "cumprod of a view in place": (in_place(lambda y: y[1].cumprod_(0)), X),
    "cumprod of a view with zeros in place": (in_place(lambda y: y[:, 1].cumprod_(0)), ZEROS),
    "cummax": (lambda x: x.cummax(1)[0], X),
    "cummin": (lambda x: x.cummin(0)[0], X),
    "mvlgamma": (lambda x: torch.mvlgamma(x, 2), X),
    "mvlgamma in place": (in_place(lambda y: y.mvlgamma_(2)), X),
    "slice_scatter": (lambda x: torch.slice_scatter(x, x[:2] * 2, 0, 1, 3), X),
    "slice_scatter, then a product": (sum_of_scatter, X),
    "select_scatter": (lambda x: torch.select_scatter(x, x[0] * 2, 0, 2), X),
    "diagonal_scatter": (lambda x: torch.diagonal_scatter(x, x[0, :4] * 2), X),
    "as_strided": (lambda x: x.as_strided((3, 2), (6, 2), 1), X),
    "as_strided of overlapping rows": (lambda x: x.as_strided((3, 4), (2, 1), 1), X),
    "trace": (torch.trace, SQUARE),
    "put": (lambda x: x.put(like(x, INDEX), x[:2, :2] * 2), X),
    "put and accumulate": (lambda x: x.put(like(x, INDEX), x[:2, :2], accumulate=True), X),
    "put in place": (in_place(lambda y: y.put_(like(y, INDEX), y[:2, :2].clone())), X),
    "index_put": (lambda x: x.index_put((torch.tensor([0, 2]),), x[:2] * 2), X),
    "index_put in place": (in_place(lambda y: y.index_put_((torch.tensor([0, 2]),), y[:2] * 2)), X),
    "index_put of a view in place": (in_place(lambda y: y[1:].index_put_((torch.tensor([0, 2]),), y[:2] * 2)), X),
    "affine_grid": (lambda x: F.affine_grid(x.reshape(4, 2, 3), [4, 1, 2, 3], align_corners=False), X),
    "as_strided_copy": (lambda x: torch.as_strided_copy(x, (3, 2), (6, 2), 1), X),
    "det of a singular matrix": (lambda x: torch.linalg.det(x - x[:1]), SQUARE),
    "householder_product": (lambda x: torch.linalg.householder_product(0.1 * x.mT, 0.1 * x[:, 0]), X),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), X),
    "layer_norm with a weight": (lambda x: F.layer_norm(x, (6,), x[0], x[1]), X),
    "sort": (lambda x: x.sort(0)[0], X),
    "topk": (lambda x: x.topk(2)[0], X),
    "max over a dim": (lambda x: x.max(1)[0], X),
    "min": (torch.min, X),
    "median over a dim": (lambda x: x.median(0)[0], X),
    "nanmedian over a dim": (lambda x: x.nanmedian(1)[0], X),
    "kthvalue": (lambda x: x.kthvalue(2)[0], X),
    "mode": (lambda x: x.mode(1)[0], X),
    "avg_pool2d": (lambda x: F.avg_pool2d(x[None, None], 2), X),
    "max_pool2d": (lambda x: F.max_pool2d(x[None, None], 2), X),
    "reflection padding": (lambda x: F.pad(x[None], (2, 1), "reflect") * F.pad(x[None], (1, 2), "reflect"), X),
    "sgn": (lambda x: x.sgn() * x, X),
    "sgn of a product": (lambda x: (x * x.flip(0)).sgn() + x.square(), X),
    "sign": (lambda x: x.sign() * x, X),
    "floor": (lambda x: x.floor() * x, X),
}


def like(x: Any, index: torch.Tensor) -> Any:
    """The index, distributed if x is."""
    return on(x.device_mesh, index) if isinstance(x, DTensor) else index


def derivatives(fn: Callable[[Any], Any], x: Any) -> list[Any]:
    """The value, its gradient, and the gradient of that."""
    y = fn(x)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    if not first.requires_grad:
        return [y, first]
    return [y, first, *torch.autograd.grad(first.square().sum(), x, allow_unused=True)]


@pytest.mark.filterwarnings("ignore::shardwise.dispatch.fallback.GatherWarning")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_device_answer(case: str, placement: Placement) -> None:
    fn, data = CASES[case]
    wanted = derivatives(fn, data.clone().requires_grad_())
    with ranks(3) as mesh:
        found = derivatives(fn, on(mesh, data, placement, grad=True))
        assert len(found) == len(wanted)
        for mine, plain in zip(found, wanted, strict=True):
            assert (mine is None) == (plain is None)
            if mine is not None:
                torch.testing.assert_close(whole(mine), plain.detach())


def test_a_gradient_that_a_formula_makes_is_replicated() -> None:
    """slice_scatter's formula fills in zeros; another op's formula meets what it returns."""
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        y = x * 2
        seen: list[Any] = []
        y.register_hook(seen.append)
        torch.trace(y).backward()
        assert isinstance(seen[0], DTensor)
        assert x.grad is not None
        assert x.grad.placements == x.placements


def test_nodes_are_freed() -> None:
    """A marked node is not kept alive by its own hooks, nor what it saved."""
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        saved = x * 1
        alive = weakref.ref(saved)
        saved = saved.cumprod(0)
        assert alive() is not None
        gc.disable()
        try:
            del saved
            assert alive() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["eq_", "ne_", "lt_", "le_", "gt_", "ge_"])
def test_comparisons_written_to_a_view_of_integers(name: str, dtype: torch.dtype) -> None:
    value, other = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype), torch.tensor([1.0, 1.0, 0.0])
    expected = value.clone()
    getattr(expected[1:], name)(other.clone().requires_grad_())
    with ranks(2) as mesh:
        for placement in (Shard(0), Shard(1), Replicate()):
            x, y = on(mesh, value, placement), on(mesh, other).requires_grad_()
            getattr(x[1:], name)(y)
            assert torch.equal(whole(x), expected.detach())
            (y * 2).sum().backward()
            assert y.grad is not None
