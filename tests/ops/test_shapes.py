"""Views, slices, joins, rolls and pads: right on every placement, and local where they can be."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.dispatch.fallback import GatherWarning
from tests.ops.helpers import check_case, communication, no_communication, on, r, ranks, whole


@pytest.fixture(autouse=True)
def no_gathering() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        yield


CASES: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("view", lambda x: x.view(4, 6), (r(8, 3),)),
    ("view merges", lambda x: x.view(-1, 3), (r(2, 5, 3),)),
    ("view splits", lambda x: x.view(2, 3, 5), (r(6, 5),)),
    ("view splits uneven", lambda x: x.view(5, 2, 3), (r(10, 3),)),
    ("view of nothing", lambda x: x.view(3, 0, 2), (r(0, 6),)),
    ("view to 1", lambda x: x.view(1, 5, 1), (r(5),)),
    ("view of one", lambda x: x.view(()), (r(1, 1),)),
    ("reshape of a transpose", lambda x: x.t().reshape(-1), (r(3, 4),)),
    ("flatten", lambda x: x.flatten(1), (r(3, 2, 2),)),
    ("unflatten", lambda x: x.unflatten(1, (2, 3)), (r(5, 6),)),
    ("view_as", lambda x, y: x.view_as(y), (r(8), r(4, 2))),
    ("permute", lambda x: x.permute(2, 0, -2), (r(3, 4, 5),)),
    ("transpose", lambda x: x.transpose(0, -1), (r(3, 4, 5),)),
    ("transpose of a vector", lambda x: x.t(), (r(5),)),
    ("movedim", lambda x: x.movedim(0, -1), (r(3, 4, 5),)),
    ("swapaxes", lambda x: x.swapaxes(0, 1), (r(3, 5),)),
    ("mT", lambda x: x.mT, (r(2, 3, 5),)),
    ("expand", lambda x: x.expand(3, 5, 4), (r(5, 1),)),
    ("expand -1", lambda x: x.expand(2, -1, 3), (r(5, 1),)),
    ("expand a scalar", lambda x: x.expand(5, 3), (r(),)),
    ("expand_as", lambda x, y: x.expand_as(y), (r(1, 4), r(5, 4))),
    ("broadcast_to", lambda x: x.broadcast_to(2, 5), (r(5),)),
    ("squeeze", lambda x: x.squeeze(), (r(1, 5, 1, 2),)),
    ("squeeze dim", lambda x: (x.squeeze(0), x.squeeze(1)), (r(1, 5),)),
    ("squeeze dims", lambda x: x.squeeze((0, 2)), (r(1, 4, 5, 1),)),
    ("squeeze a row each", lambda x: x.squeeze(), (r(4, 3),)),
    ("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1)), (r(5, 2),)),
    ("unsqueeze a scalar", lambda x: x.unsqueeze(0), (r(),)),
    ("view_as_complex", lambda x: torch.view_as_complex(x) * 2, (r(5, 2),)),
    ("view_as_real", lambda x: torch.view_as_real(x), (r(5, 3, dtype=torch.complex64),)),
    ("real and imag", lambda x: (x.real, x.imag), (r(5, 3, dtype=torch.complex64),)),
    ("view dtype", lambda x: x.view(torch.int32), (r(5, 4, dtype=torch.int64),)),
    ("view dtype same size", lambda x: x.detach().view(torch.int32), (r(5, 4),)),
    ("unfold", lambda x: x.unfold(0, 3, 2), (r(7, 3),)),
    ("diagonal", lambda x: x.diagonal(1), (r(5, 4),)),
    ("diagonal of a batch", lambda x: x.diagonal(0, 0, 2), (r(5, 3, 4),)),
    ("as_strided itself", lambda x: x.as_strided((5, 4), (4, 1)), (r(5, 4),)),
    ("as_strided", lambda x: x.as_strided((4, 2), (1, 4), 2), (r(5, 4),)),
    ("slice", lambda x: x[1:4], (r(5, 3),)),
    ("slice 2-D", lambda x: x[:, 2:], (r(3, 8),)),
    ("slice both", lambda x: x[1:-1, :3], (r(6, 5),)),
    ("slice step", lambda x: x[1::2], (r(9, 3),)),
    (
        "slice step 3",
        lambda x: x[:8:3],
        (
            r(
                11,
            ),
        ),
    ),
    ("slice all", lambda x: x[0:10], (r(5, 3),)),
    ("slice empty", lambda x: x[3:3] * 2, (r(5, 3),)),
    ("slice bool", lambda x: x[2:], (r(5, 3, dtype=torch.bool),)),
    ("slice bf16", lambda x: x[2:7], (r(8).round().bfloat16(),)),
    ("narrow", lambda x: x.narrow(0, 2, 3), (r(7, 2),)),
    ("select", lambda x: x[3], (r(5, 3),)),
    ("select last", lambda x: x[..., -1], (r(5, 3),)),
    ("select to a scalar", lambda x: x[2], (r(5),)),
    ("select bool", lambda x: x[1], (r(5, 2, dtype=torch.bool),)),
    ("select int", lambda x: x[4], (r(5, 2, dtype=torch.int64),)),
    ("index mixed", lambda x: x[1, 1:, None, ..., 0], (r(3, 5, 2, 2),)),
    ("split", lambda x: x.split(2), (r(7, 2),)),
    ("split sizes", lambda x: x.split([3, 0, 2], 1), (r(2, 5),)),
    ("chunk", lambda x: x.chunk(3), (r(8, 2),)),
    ("tensor_split", lambda x: x.tensor_split(3), (r(7, 2),)),
    ("unsafe_split", lambda x: torch.unsafe_split(x, 3), (r(7, 2),)),
    ("unbind", lambda x: x.unbind(0), (r(4, 3),)),
    ("unbind last", lambda x: x.unbind(-1), (r(5, 3),)),
    ("cat", lambda x, y: torch.cat([x, y]), (r(5, 3), r(2, 3))),
    ("cat last", lambda x, y, z: torch.cat([x, y, z], -1), (r(2, 4), r(2, 1), r(2, 3))),
    ("cat promotes", lambda x, y: torch.cat([x, y]), (r(5, 3), r(3, 3, dtype=torch.int64))),
    ("cat of nothing", lambda x, y: torch.cat([x, y]), (r(5, 3), r(0, 3))),
    ("stack", lambda x, y: torch.stack([x, y]), (r(5, 3), r(5, 3))),
    ("stack last", lambda x, y: torch.stack([x, y], -1), (r(5), r(5))),
    ("hstack", lambda x, y: torch.hstack([x, y]), (r(3, 4), r(3, 1))),
    ("vstack", lambda x, y: torch.vstack([x, y]), (r(5), r(5))),
    ("dstack", lambda x, y: torch.dstack([x, y]), (r(3, 5), r(3, 5))),
    ("repeat", lambda x: x.repeat(2, 3), (r(5, 2),)),
    ("repeat more dims", lambda x: x.repeat(2, 1, 2), (r(5, 4),)),
    ("repeat zero times", lambda x: x.repeat(2, 0), (r(3, 2),)),
    ("tile", lambda x: x.tile((2,)), (r(3, 5),)),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, 0), (r(5, 2),)),
    ("repeat_interleave flat", lambda x: x.repeat_interleave(2), (r(3, 2),)),
    ("roll", lambda x: x.roll(2, 0), (r(7, 2),)),
    ("roll back", lambda x: x.roll(-1, 1), (r(2, 5),)),
    ("roll twice", lambda x: x.roll((1, 2), (0, 1)), (r(5, 3),)),
    ("roll one dim twice", lambda x: x.roll((1, 2), (0, 0)), (r(5, 3),)),
    ("roll flat", lambda x: x.roll(2), (r(5, 3),)),
    ("flip", lambda x: x.flip(0), (r(5, 3),)),
    ("flip both", lambda x: x.flip(0, 1), (r(5, 3),)),
    ("fliplr", lambda x: torch.fliplr(x), (r(3, 5),)),
    ("rot90", lambda x: x.rot90(), (r(3, 5),)),
    ("pad", lambda x: F.pad(x, (1, 2)), (r(3, 5),)),
    ("pad both", lambda x: F.pad(x, (1, 0, 2, 3), value=2.0), (r(3, 5),)),
    ("pad negative", lambda x: F.pad(x, (-1, 2, -2, -1)), (r(7, 5),)),
    ("pad a lot", lambda x: F.pad(x, (9, 0)), (r(3),)),
    ("pad reflect", lambda x: F.pad(x, (2, 1), mode="reflect"), (r(3, 2, 5),)),
    ("pad replicate", lambda x: F.pad(x, (2, 1, 0, 1), mode="replicate"), (r(1, 2, 3, 5),)),
    ("pad circular", lambda x: F.pad(x, (2, 1), mode="circular"), (r(3, 2, 5),)),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (r(2, 8, 3, 2),)),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (r(2, 2, 6, 4),)),
    ("tril", lambda x: x.tril(), (r(5, 4),)),
    ("triu", lambda x: x.triu(1), (r(2, 4, 5),)),
    ("triu of a view", lambda x: x.view(6, 4).triu(-2), (r(2, 3, 4),)),
    ("diag", lambda x: x.diag(), (r(5),)),
    ("diag of a matrix", lambda x: x.diag(-1), (r(5, 4),)),
    ("diag_embed", lambda x: torch.diag_embed(x, 1, 0, 2), (r(3, 4),)),
    ("trace", lambda x: x.trace(), (r(5, 4),)),
    ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (r(5), r(3))),
    ("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 0, 1, 6, 2), (r(7, 2), r(3, 2))),
    ("select_scatter", lambda x, y: torch.select_scatter(x, y, 0, 3), (r(5, 2), r(2))),
    ("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y), (r(5, 4), r(4))),
    ("as_strided_scatter", lambda x, y: torch.as_strided_scatter(x, y, (2, 2), (1, 2)), (r(5, 2), r(2, 2))),
    ("sum_to_size", lambda x: x.sum_to_size(1, 4), (r(5, 4),)),
    ("contiguous", lambda x: x.t().contiguous(), (r(5, 4),)),
    ("new_empty_strided", lambda x: x.new_empty_strided((5, 4), (1, 5)).fill_(1.0), (r(5, 4),)),
]


@pytest.mark.parametrize(("fn", "tensors"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_equals_one_device(fn: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> None:
    check_case(fn, tensors, limit=5, meshes=((2,), (4,), (2, 2)))


def test_all_of_a_cut_dim_is_a_local_slice() -> None:
    with ranks(4) as mesh, no_communication():
        x = on(mesh, r(5, 8), Shard(0))
        for view in (x[:], x[0:5], x[:, 2:6], x[-9:], x[..., 3], x.narrow(0, 0, 5)):
            assert view.placements == (Shard(0),)
            assert view.shards[0].data_ptr() >= x.shards[0].data_ptr()


LOCAL: list[tuple[str, Callable[..., Any], int]] = [
    ("select of a cut dim is a sum", lambda x: x[3], 0),
    ("select of another dim", lambda x: x[:, 3], 0),
    ("unsqueeze", lambda x: x.unsqueeze(1), 0),
    ("expand", lambda x: x.expand(3, 8, 8), 0),
    ("stack", lambda x: torch.stack([x, x]), 0),
    ("cat along another dim", lambda x: torch.cat([x, x], 1), 0),
    ("split along another dim", lambda x: x.split(3, 1), 0),
    ("flip another dim", lambda x: x.flip(1), 0),
    ("roll another dim", lambda x: x.roll(3, 1), 0),
    ("pad another dim", lambda x: F.pad(x, (1, 1)), 0),
    ("repeat", lambda x: x.repeat(2, 2), 0),
    ("tril", lambda x: x.tril(), 0),
    ("view", lambda x: x.view(2, 4, 8), 0),
    ("flatten", lambda x: x.flatten(), 0),
    ("slice", lambda x: x[1:5], 1),
    ("chunk", lambda x: x.chunk(3), 1),
    ("cat of equal sizes", lambda x: torch.cat([x, x, x]), 0),
    ("slice and cat of other sizes", lambda x: torch.cat([x, x[:4]]), 2),
    ("roll", lambda x: x.roll(3, 0), 1),
    ("flip", lambda x: x.flip(0), 1),
    ("pad", lambda x: F.pad(x, (0, 0, 2, 1)), 1),
]


@pytest.mark.parametrize(("fn", "collectives"), [case[1:] for case in LOCAL], ids=[case[0] for case in LOCAL])
def test_what_moves(fn: Callable[..., Any], collectives: int) -> None:
    with ranks(2) as mesh:
        x = on(mesh, r(8, 8), Shard(0))
        found = communication(lambda: fn(x))
        assert len(found) == collectives, found
        assert all("inside" in text for text in found), "a kernel moves what is lacking, nothing is gathered"


def test_slices_are_balanced_again() -> None:
    with ranks(4) as mesh:
        x = on(mesh, r(16, 2), Shard(0))
        assert [tuple(s.shape) for s in x[3:11].shards.values()] == [(2, 2)] * 4
        assert [tuple(s.shape) for s in torch.cat([x, x[:2]]).shards.values()] == [(5, 2), (5, 2), (5, 2), (3, 2)]


def test_errors_are_those_of_plain_tensors() -> None:
    with ranks(2) as mesh:
        x = on(mesh, r(4, 2), Shard(0))
        for wrong in (
            lambda t: t.view(3, 3),
            lambda t: t[5],
            lambda t: t.split([1, 2]),
            lambda t: t.expand(3, 2),
            lambda t: t.permute(0, 0),
        ):
            with pytest.raises((RuntimeError, IndexError)) as plain:
                wrong(r(4, 2))
            with pytest.raises(plain.type) as found:
                wrong(x)
            assert str(found.value).partition("\n")[0] == str(plain.value).partition("\n")[0]


@pytest.mark.parametrize("size", [(3, 4), (2, 3), (5, 4)], ids=str)
def test_resized_in_place(size: tuple[int, ...]) -> None:
    """As many numbers as before stay, in row-major order."""
    with ranks(2, 2) as mesh:
        for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Partial()]):
            x = on(mesh, r(4, 3), *placements)
            same = x.resize_(size)
            assert same is x
            kept = min(12, math.prod(size))
            torch.testing.assert_close(whole(x).flatten()[:kept], r(4, 3).flatten()[:kept])
            assert x.shape == size
            assert x.resize_as_(on(mesh, r(6), Shard(0))).shape == (6,)
