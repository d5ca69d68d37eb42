"""Calls of ops that no function of PyTorch's operator database makes, for probing.

They vary what a rule may depend on: numbers of dims, flags and dims. Sizes need not vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .own_samples import Row, aten, integers
from .own_samples import random_values as values

FLAGS = (False, True)


def _positive(*shape: int, seed: int = 0) -> Tensor:
    return values(*shape, seed=seed).abs() + 0.25


def _elementwise() -> list[Row]:
    shapes = [(5,), (4, 3), (2, 3, 4)]
    rows: list[Row] = [(aten._add_relu.Tensor, (values(*s), values(*s, seed=1)), {}) for s in shapes]
    rows.append((aten._add_relu.Tensor, (values(4, 3), values(3)), {}))
    rows += [(aten._add_relu.Scalar, (values(*s), 0.5), {}) for s in shapes]
    rows += [(aten._standard_gamma_grad, (_positive(*s), _positive(*s, seed=1)), {}) for s in shapes]
    rows += [(aten._dirichlet_grad, tuple(_positive(*s, seed=i) for i in range(3)), {}) for s in shapes[1:]]
    for s, training, result in itertools.product(shapes, FLAGS, FLAGS):
        given = (values(*s), values(*s, seed=1), _positive(*s, seed=2), 0.1, 0.3, training, result)
        rows.append((aten.rrelu_with_noise_backward, given, {}))
    return rows


def _quantization() -> list[Row]:
    rows: list[Row] = []
    one, zero = torch.tensor([0.1]), torch.tensor([0.0])
    for shape in ((5,), (4, 3), (2, 3, 4)):
        x = values(*shape, dtype=torch.float32)
        for low, high in ((0, 255), (-128, 127), (-8, 7)):
            rows.append((aten.fake_quantize_per_tensor_affine_cachemask, (x, 0.1, 3, low, high), {}))
            rows.append((aten.fake_quantize_per_tensor_affine_cachemask, (x, 0.1, low, low, high), {}))
            rows.append((aten.fake_quantize_per_tensor_affine_cachemask, (x, 0.1, 7, low, high), {}))
            rows.append((aten._fake_quantize_learnable_per_tensor_affine, (x, one, zero, low, high), {}))
            for axis, size in enumerate(shape):
                scale, point = _positive(size).float() / 10, integers(5, size).int()
                given = (x, scale, point, axis, low, high)
                rows.append((aten.fake_quantize_per_channel_affine_cachemask, given, {}))
                learned = (x, scale, point.float(), axis, low, high)
                rows.append((aten._fake_quantize_learnable_per_channel_affine, learned, {}))
    return rows


def _reductions() -> list[Row]:
    rows: list[Row] = []
    for shape in ((5,), (4, 3), (2, 3, 4)):
        x = values(*shape)
        rows.append((aten._aminmax, (x,), {}))
        rows.append((aten._is_all_true, (x > -2,), {}))
        rows.append((aten._is_any_true, (x > 1,), {}))
        for dim in range(len(shape)):
            rows += [(aten._aminmax.dim, (x, dim, keep), {}) for keep in FLAGS]
            rows.append((aten._logcumsumexp, (x, dim), {}))
            rows += [(aten.linalg__powsum, (x, 2, [dim], keep), {}) for keep in FLAGS]
    return rows


def _matrices() -> list[Row]:
    rows: list[Row] = []
    for gelu in FLAGS:
        for bias in ((5,), (4, 5)):
            given = (values(*bias), values(4, 3, seed=1), values(3, 5, seed=2))
            rows.append((aten._addmm_activation, given, {"use_gelu": gelu}))
    for batch, upper in itertools.product(((), (2,), (2, 3)), FLAGS):
        triangle = values(*batch, 4, 4).tril() + 3 * torch.eye(4, dtype=torch.float64)
        factor = triangle.mT.contiguous() if upper else triangle
        rows.append((aten._cholesky_solve_helper, (values(*batch, 4, 3, seed=1), factor, upper), {}))
    rows.append((aten._compute_linear_combination, (values(3, 4, 5), values(2, 3, seed=1)), {}))
    packed = integers(20, 5, 8).to(torch.int8)
    rows.append((aten._weight_int8pack_mm, (values(4, 8).bfloat16(), packed, values(5).bfloat16()), {}))
    return rows


def _windows() -> list[Row]:
    rows: list[Row] = []
    for bias in (values(6), None):
        for stride, padding, kernel in ((1, 0, 2), (2, 1, 3), (3, 2, 1)):
            for name, dims in (("_slow_conv2d_forward", 2), ("slow_conv3d_forward", 3)):
                x, weight = values(2, 3, *[7, 6, 5][:dims]), values(6, 3, *[kernel, 2, 2][:dims], seed=1)
                given = (x, weight, list(weight.shape[2:]), bias, [stride] * dims, [padding] * dims)
                rows.append((getattr(aten, name), given, {}))
    for pad in (0, 1, 2):
        rows.append((aten.conv_tbc, (values(5, 2, 3), values(3, 3, 4, seed=1), values(4), pad), {}))
    image = values(2, 3, 6, 7)
    if not hasattr(aten, "_upsample_lanczos2d_aa"):  # new in PyTorch 2.12
        return rows
    for corners, size in itertools.product(FLAGS, ([3, 4], [8, 9], [12, 5])):
        rows.append((aten._upsample_lanczos2d_aa, (image, size, corners), {}))
        gradient = (values(2, 3, *size), size, [2, 3, 6, 7], corners)
        rows.append((aten._upsample_lanczos2d_aa_backward, gradient, {}))
    return rows


def _sampled_windows() -> list[Row]:
    rows: list[Row] = []
    volume, samples = values(2, 3, 6, 7, 5), torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    for kernel, size in (([2, 2, 2], [3, 4, 2]), ([3, 2, 2], [2, 3, 3]), ([2, 3, 1], [2, 3, 4])):
        rows.append((aten.fractional_max_pool3d, (volume, kernel, size, samples), {}))
        result, indices = aten.fractional_max_pool3d(volume, kernel, size, samples)
        gradient = (values(*result.shape, seed=3), volume, kernel, size, indices)
        rows.append((aten.fractional_max_pool3d_backward, gradient, {}))
    return rows


def _attention() -> list[Row]:
    rows: list[Row] = [(aten._transform_bias_rescale_qkv, (values(2, 5, 24), values(24, seed=1), 4), {})]
    for dim in (0, 1, 2, 3):
        mask = integers(2, 2, 3, 4, 5).bool()
        rows.append((aten._masked_softmax, (values(2, 3, 4, 5), mask, dim, 2), {}))
        given = (values(2, 3, 4, 5), values(2, 3, 4, 5, seed=1).softmax(dim), mask, dim)
        rows.append((aten._masked_softmax_backward, given, {}))
    return rows


def _halves() -> list[Row]:
    rows: list[Row] = []
    for shape in ((4,), (4, 6), (2, 4, 6)):
        for dim in range(len(shape)):
            half = [size // 2 if i == dim else size for i, size in enumerate(shape)]
            x, glu = values(*shape), values(*half, seed=1)
            rows.append((aten.glu_jvp, (glu, x, values(*shape, seed=2), dim), {}))
            given = (x, glu, values(*shape, seed=2), values(*half, seed=3), values(*shape, seed=4), dim)
            rows.append((aten.glu_backward_jvp, given, {}))
    return rows


def _ctc() -> list[Row]:
    rows: list[Row] = []
    scores = values(7, 3, 5).log_softmax(2)
    targets = integers(4, 3, 4, seed=1) + 1
    for zero, blank in itertools.product(FLAGS, (0,)):
        for lengths in (([7, 6, 7], [2, 3, 1]), ([5, 7, 6], [3, 3, 2]), ([6, 6, 6], [1, 2, 3])):
            times, sizes = (torch.tensor(length) for length in lengths)
            rows.append((aten._ctc_loss.Tensor, (scores, targets, times, sizes, blank, zero), {}))
            loss, alpha = aten._ctc_loss.Tensor(scores, targets, times, sizes, blank, zero)
            given: tuple[object, ...] = (_positive(3), scores, targets, times, sizes, loss, alpha, blank, zero)
            rows.append((aten._ctc_loss_backward.Tensor, given, {}))
    return rows


PROBED: dict[str, Callable[[], list[Row]]] = {
    "probed:elementwise": _elementwise,
    "probed:quantization": _quantization,
    "probed:reductions": _reductions,
    "probed:matrices": _matrices,
    "probed:windows": _windows,
    "probed:sampled_windows": _sampled_windows,
    "probed:attention": _attention,
    "probed:halves": _halves,
    "probed:ctc": _ctc,
}
"""The samples by the name of their entry."""
