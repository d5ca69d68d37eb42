"""Convolutions with every dim cut, the spatial ones by an exchange of neighbouring rows; pools and resampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.testing import check
from tests.ops.helpers import check_case, no_communication, on, r, ranks, table, whole

image = r(2, 3, 7, 5)

CONVOLUTIONS: list[Any] = [
    ("1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), (r(2, 3, 7), r(4, 3, 3), r(4))),
    ("2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (image, r(4, 3, 3, 3), r(4))),
    ("2d, no bias", lambda x, w: F.conv2d(x, w, None, 2, (2, 3), 2), (r(2, 3, 9, 5), r(4, 3, 3, 2))),
    ("3d", lambda x, w, b: F.conv3d(x, w, b, stride=2), (r(1, 2, 5, 5, 5), r(2, 2, 2, 2, 2), r(2))),
    ("groups", lambda x, w, b: F.conv2d(x, w, b, 1, 1, groups=2), (r(2, 4, 5, 5), r(6, 2, 3, 3), r(6))),
    ("depthwise", lambda x, w, b: F.conv2d(x, w, b, 1, 1, groups=4), (r(2, 4, 5, 5), r(4, 1, 3, 3), r(4))),
    ("only padding", lambda x, w, b: F.conv1d(x, w, b, padding=5), (r(1, 2, 3), r(2, 2, 2), r(2))),
    ("one image", lambda x, w, b: F.conv1d(x, w, b), (r(2, 5), r(2, 2, 2), r(2))),
    (
        "transposed",
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1),
        (r(2, 3, 4, 5), r(3, 4, 3, 3), r(4)),
    ),
    ("transposed, dilated", lambda x, w: F.conv_transpose1d(x, w, None, 3, dilation=2), (r(2, 3, 5), r(3, 4, 2))),
    ("transposed, groups", lambda x, w: F.conv_transpose1d(x, w, None, 2, groups=2), (r(2, 4, 5), r(4, 3, 2))),
]


@table(CONVOLUTIONS)
def test_convolutions(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=6)


WINDOWS = [(1, 0, 1, 1), (1, 1, 1, 3), (2, 0, 1, 3), (2, 2, 2, 3), (3, 1, 2, 3), (4, 0, 1, 2)]


@pytest.mark.parametrize(("stride", "padding", "dilation", "kernel"), WINDOWS)
def test_a_cut_width_gives_right_results_and_gradients(stride: int, padding: int, dilation: int, kernel: int) -> None:
    same, wide, one = Replicate(), Shard(3), [Replicate()]
    placements = [
        [[wide], one, one],
        [[wide, Shard(0)], one * 2, one * 2],
        [[wide, wide], one * 2, one * 2],
        [[wide, same], [same, Shard(0)], [same, Shard(0)]],
    ]
    meshes = ((2,), (3,), (8,), (2, 2))
    result = check(
        lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation),
        *(r(2, 3, 5, 13), r(4, 3, 3, kernel), r(4)),
        placements=placements,
        meshes=meshes,
    )
    transposed = check(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride, min(padding, kernel - 1), stride - 1, 1, dilation),
        *(r(2, 3, 5, 7), r(3, 4, 3, kernel), r(4)),
        placements=placements[:3],
        meshes=meshes,
    )
    assert result.cases
    assert transposed.cases


def test_a_cut_width_stays_cut() -> None:
    with ranks(4) as mesh:
        x = on(mesh, r(2, 3, 6, 16), Shard(3), grad=True)
        w = on(mesh, r(4, 3, 3, 3), Replicate(), grad=True)
        result = F.conv2d(x, w, padding=1)
        assert result.placements == (Shard(3),)
        result.backward(torch.ones_like(result))
        assert x.grad is not None
        assert x.grad.placements == (Shard(3),)


def test_batch_and_channels_are_local() -> None:
    with ranks(2) as mesh:
        x, w, b = r(4, 4, 5, 5), r(6, 4, 3, 3), r(6)
        cut = {
            "batch": (Shard(0), Replicate(), Replicate(), Shard(0)),
            "outputs": (Replicate(), Shard(0), Shard(0), Shard(1)),
            "inputs": (Shard(1), Shard(1), Replicate(), Partial()),
        }
        for input_, weight, bias, result in cut.values():
            tensors = on(mesh, x, input_), on(mesh, w, weight), on(mesh, b, bias)
            with no_communication():
                found = F.conv2d(*tensors)
            assert found.placements == (result,)
            torch.testing.assert_close(whole(found), F.conv2d(x, w, b), rtol=1e-4, atol=1e-4)


POOLS: list[Any] = [
    ("max_pool1d", lambda x: F.max_pool1d(x, 2), (r(2, 3, 6),)),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2), (image,)),
    ("max_pool2d with indices", lambda x: F.max_pool2d(x, 2, return_indices=True), (image,)),
    ("max_pool3d", lambda x: F.max_pool3d(x, 2), (r(2, 3, 4, 4, 4),)),
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (r(2, 3, 6),)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2), (image,)),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), (image,)),
    ("adaptive_avg_pool2d to one", lambda x: F.adaptive_avg_pool2d(x, 1), (image,)),
    ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), (image,)),
    ("nearest", lambda x: F.interpolate(x, scale_factor=2), (image,)),
    ("bilinear", lambda x: F.interpolate(x, size=(3, 9), mode="bilinear"), (image,)),
    ("bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (image,)),
    ("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (r(2, 3, 3, 3, 3),)),
    ("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), (image, r(2, 3, 4, 2).tanh())),
    ("affine_grid", lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False), (r(2, 2, 3),)),
    ("unfold", lambda x: F.unfold(x, 2), (image,)),
    ("fold", lambda x: F.fold(x, (4, 4), 2), (r(2, 8, 9),)),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (r(2, 8, 3, 3),)),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (r(2, 3, 4, 4),)),
]


@table(POOLS)
def test_pools_and_resampling(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=4, meshes=((4,), (2, 2)), rtol=1e-3, atol=1e-4)
