"""Looking up and writing by index: right on every placement, a cut table included, mostly without communication."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Shard
from shardwise.dispatch.fallback import GatherWarning
from tests.ops.helpers import check_case, communication, on, r, ranks, whole


def i(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def no_gathering() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        warnings.filterwarnings("ignore", "The reduce argument|index_reduce")
        yield


def twice(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.embedding(a, w).sin() @ F.embedding(b, w).t()


Case = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]
CASES: list[Case] = [
    ("embedding", lambda w, x: F.embedding(x, w), (r(10, 3), i(10, 5, 2))),
    ("embedding padding", lambda w, x: F.embedding(x, w, padding_idx=2), (r(5, 2), i(5, 7))),
    ("embedding by frequency", lambda w, x: F.embedding(x, w, scale_grad_by_freq=True), (r(5, 2), i(5, 9))),
    ("embedding both", lambda w, x: F.embedding(x, w, 4, scale_grad_by_freq=True), (r(5, 2), i(5, 9))),
    ("embedding infinite", lambda w, x: F.embedding(x, w), (torch.full((5, 2), torch.inf), i(5, 4))),
    ("embedding one index", lambda w, x: F.embedding(x, w), (r(5, 2), torch.tensor(3))),
    ("embedding used twice", twice, (r(10, 3), i(10, 4), i(10, 5))),
    ("embedding_bag", lambda w, x, y: F.embedding_bag(x, w, y), (r(5, 3), i(5, 8), torch.tensor([0, 3, 4]))),
    ("gather", lambda x, y: x.gather(0, y), (r(5, 3), i(5, 4, 3))),
    ("gather last", lambda x, y: x.gather(-1, y), (r(3, 5), i(5, 3, 2))),
    ("gather shorter", lambda x, y: x.gather(1, y), (r(5, 4), i(4, 3, 6))),
    ("gather scalar", lambda x, y: x.gather(0, y), (r(), torch.tensor(0))),
    ("gather int", lambda x, y: x.gather(0, y), (i(9, 5, 2), i(5, 4, 2))),
    ("take_along_dim", lambda x, y: torch.take_along_dim(x, y, 1), (r(5, 4), i(4, 5, 2))),
    ("scatter src", lambda x, y, z: x.scatter(0, y, z), (r(5, 3), i(1, 1, 3), r(1, 3))),
    ("scatter value", lambda x, y: x.scatter(1, y, 2.5), (r(3, 5), i(5, 3, 2))),
    ("scatter add", lambda x, y, z: x.detach().scatter(0, y, z.detach(), reduce="add"), (r(5, 3), i(5, 6, 3), r(6, 3))),
    ("scatter multiply", lambda x, y: x.detach().scatter(0, y, 2.0, reduce="multiply"), (r(5, 3), i(5, 6, 3))),
    ("scatter_add", lambda x, y, z: x.scatter_add(0, y, z), (r(5, 3), i(5, 7, 3), r(7, 3))),
    (
        "scatter_add longer source",
        lambda x, y, z: x.detach().scatter_add(1, y, z.detach()),
        (r(3, 5), i(5, 2, 3), r(4, 6)),
    ),
    ("scatter_add_", lambda x, y, z: x.scatter_add_(0, y, z), (r(5, 3), i(5, 7, 3), r(7, 3))),
    ("scatter_reduce sum", lambda x, y, z: x.scatter_reduce(0, y, z, "sum"), (r(5, 2), i(5, 7, 2), r(7, 2))),
    (
        "scatter_reduce amax",
        lambda x, y, z: x.scatter_reduce(0, y, z, "amax"),
        (i(9, 5, 2).float(), i(5, 7, 2), i(9, 7, 2).float()),
    ),
    (
        "scatter_reduce mean without self",
        lambda x, y, z: x.scatter_reduce(0, y, z, "mean", include_self=False),
        (r(5, 2), i(5, 7, 2), r(7, 2)),
    ),
    ("index", lambda x, y: x[y], (r(5, 3), i(5, 4))),
    ("index negative", lambda x, y: x[y], (r(5, 3), i(0, 4, low=-5))),
    ("index 2-D", lambda x, y: x[y], (r(5, 3), i(5, 2, 4))),
    ("index second", lambda x, y: x[:, y], (r(3, 5, 2), i(5, 4))),
    ("index two", lambda x, y, z: x[y, z], (r(5, 3), i(5, 4), i(3, 4))),
    ("index two apart", lambda x, y, z: x[y, :, z], (r(5, 2, 3), i(5, 4), i(3, 4))),
    ("index broadcast", lambda x, y, z: x[y, z], (r(5, 3), i(5, 4, 1), i(3, 2))),
    ("index and slice", lambda x, y: x[1:, y, 0], (r(5, 4, 2), i(4, 3))),
    ("_unsafe_index", lambda x, y: torch.ops.aten._unsafe_index(x, [None, y]), (r(3, 5), i(5, 4))),
    ("index_put", lambda x, y, z: x.index_put((y,), z), (r(5, 3), torch.tensor([3, 0]), r(2, 3))),
    ("index_put accumulate", lambda x, y, z: x.index_put((y,), z, True), (r(5, 3), i(5, 7), r(7, 3))),
    ("index_put broadcast", lambda x, y, z: x.index_put((y,), z, True), (r(5, 3), i(5, 7), r(3))),
    ("index_put two", lambda x, y, z, v: x.index_put((y, z), v, True), (r(5, 3), i(5, 4), i(3, 4), r(4))),
    (
        "index_put second",
        lambda x, y, z: torch.ops.aten.index_put(x, [None, y], z, True),
        (r(3, 5), i(5, 4, low=-5), r(3, 4)),
    ),
    ("index_put_", lambda x, y, z: x.index_put_((y,), z), (r(5, 3), torch.tensor([3, 0]), r(2, 3))),
    ("setitem", lambda x, y, z: (x.__setitem__(y, z), x)[1], (r(5, 3), torch.tensor([1, 4]), r(3))),
    ("setitem number", lambda x, y: (x.__setitem__((slice(None), y), 2.0), x)[1], (r(3, 5), torch.tensor([1, 4]))),
    ("setitem mask", lambda x, y: (x.__setitem__(y > 0, 2.0), x)[1], (r(3, 5), r(3, 5))),
    ("setitem mask of rows", lambda x, y: (x.__setitem__(y > 0, 2.0), x)[1], (r(5, 3), r(5))),
    ("index_select", lambda x, y: x.index_select(0, y), (r(5, 3), i(5, 4))),
    ("index_select last", lambda x, y: x.index_select(-1, y), (r(3, 5), i(5, 4))),
    ("index_select scalar index", lambda x, y: x.index_select(0, y), (r(5, 3), torch.tensor(2))),
    ("index_add", lambda x, y, z: x.index_add(0, y, z, alpha=2), (r(5, 3), i(5, 7), r(7, 3))),
    ("index_add_", lambda x, y, z: x.index_add_(1, y, z), (r(3, 5), i(5, 4), r(3, 4))),
    ("index_copy", lambda x, y, z: x.index_copy(0, y, z), (r(5, 3), torch.tensor([4, 0]), r(2, 3))),
    ("index_fill", lambda x, y: x.index_fill(0, y, 3.0), (r(5, 3), torch.tensor([-1, 0]))),
    ("index_fill tensor", lambda x, y, z: x.index_fill(0, y, z), (r(5, 3), torch.tensor([2, 0]), r())),
    (
        "index_reduce",
        lambda x, y, z: x.index_reduce(0, y, z, "amax"),
        (i(9, 5, 3).float(), i(5, 4), i(9, 4, 3).float()),
    ),
    ("take", lambda x, y: x.take(y), (r(5), i(5, 3, 2))),
    ("take of a matrix", lambda x, y: x.take(y), (r(5, 2), i(10, 4))),
    ("put", lambda x, y, z: x.put(y, z, True), (r(5, 2), i(10, 4), r(4))),
    ("masked_fill", lambda x, y: x.masked_fill(y > 0, 2.0), (r(5, 3), r(3))),
    ("masked_fill tensor", lambda x, y, z: x.masked_fill(y > 0, z), (r(5, 3), r(5, 1), r())),
    ("masked_fill_", lambda x, y: x.masked_fill_(y > 0, 2.0), (r(5, 3), r(5, 3))),
    ("masked_scatter", lambda x, y, z: x.masked_scatter(y > 0, z), (r(5, 3), r(5, 3), r(15))),
    ("where", lambda x, y, z: torch.where(x > 0, y, z), (r(5, 1), r(5, 3), r(3))),
    ("where number", lambda x, y: torch.where(x > 0, y, 2.0), (r(5, 3), r(3))),
    ("bucketize", lambda x, y: torch.bucketize(x, y), (r(5, 3), torch.tensor([-1.0, 0.0, 1.0]))),
    ("searchsorted", lambda x, y: torch.searchsorted(x, y), (torch.tensor([-1.0, 0.0, 1.0]), r(5, 3))),
    (
        "searchsorted rows",
        lambda x, y: torch.searchsorted(x, y),
        (i(9, 5, 3).sort().values.float(), i(9, 5, 2).float()),
    ),
    ("index list", lambda x: x[[0, 4]] + x[:, [-1, 0, 1], None].sum(), (r(5, 3),)),
    ("index plain", lambda x: x[torch.tensor([0, 4])], (r(5, 3),)),
    ("setitem list", lambda x: (x.__setitem__([0, 3], 1.0), x)[1], (r(5, 3),)),
    ("index of mask", lambda x: x[x > 0], (r(5, 3),)),
    ("masked_select", lambda x: x.masked_select(x > 0), (r(5, 3),)),
]


@pytest.mark.parametrize(("fn", "tensors"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_equals_one_device(fn: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> None:
    check_case(fn, tensors, limit=5, meshes=((2,), (4,), (2, 2)))


LOCAL: list[tuple[str, Callable[..., Any]]] = [
    ("embedding", lambda x, y: F.embedding(y, x)),
    ("index", lambda x, y: x[y]),
    ("index_select", lambda x, y: x.index_select(0, y)),
    ("gather", lambda x, y: x.gather(0, y[:, None].expand(-1, 4))),
    ("index_fill", lambda x, y: x.index_fill(0, y, 1.0)),
    ("index_put", lambda x, y: x.index_put((y,), x.new_ones(()))),
    ("masked_fill", lambda x, y: x.masked_fill(x > 0, 1.0)),
]


@pytest.mark.parametrize("fn", [case[1] for case in LOCAL], ids=[case[0] for case in LOCAL])
def test_a_cut_table_needs_no_communication(fn: Callable[..., Any]) -> None:
    with ranks(4) as mesh:
        x, y = on(mesh, r(10, 4), Shard(0)), on(mesh, i(10, 6))
        assert communication(lambda: fn(x, y)) == []


def test_a_vocabulary_cut_over_ranks_used_twice() -> None:
    """Ten rows on four ranks, of which the last holds one: the same weight looks up and scores."""
    weight, tokens = r(10, 3), i(10, 2, 5)

    def loss(w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        hidden = F.embedding(t, w).tanh()
        return (hidden @ w.t()).logsumexp(-1).sum() + F.embedding(t, w, padding_idx=3).sum()

    plain = weight.clone().requires_grad_()
    loss(plain, tokens).backward()
    with ranks(4) as mesh:
        w, t = on(mesh, weight, Shard(0), grad=True), on(mesh, tokens)
        for _ in range(2):
            loss(w, t).backward()
        assert w.grad.placements == (Shard(0),)
        torch.testing.assert_close(whole(w.grad), 2 * plain.grad)


def test_an_index_out_of_bounds_is_an_error() -> None:
    with ranks(4) as mesh:
        x, y = on(mesh, r(10, 3), Shard(0)), on(mesh, torch.tensor([3, 10]))
        for fn in (lambda: x[y], lambda: F.embedding(y, x), lambda: x.index_select(0, y)):
            with pytest.raises(IndexError, match="out of bounds"):
                fn()
