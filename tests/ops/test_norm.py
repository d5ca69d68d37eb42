"""Normalizations: what is normalized together may be sharded, statistics are those of the global tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Replicate, Shard, implicit_replication
from tests.ops.helpers import Case, check_case, communication, no_communication, on, r, ranks, table, whole

BF16 = torch.bfloat16
positive = r(4).abs() + 0.5


def batch_norm(x, weight, bias, mean, var, **options):
    return F.batch_norm(x, mean.detach(), var.detach(), weight, bias, **options)


def training(*args):
    return batch_norm(*args, training=True, momentum=0.3)


def evaluating(*args):
    return batch_norm(*args, training=False)


def inferring(fn):
    def run(*args):
        with torch.inference_mode():
            return fn(*args)

    return run


def layer_norm(x, *parameters):
    return F.layer_norm(x, parameters[0].shape, *parameters)


def rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight)


CASES: list[Case] = [
    ("layer_norm", layer_norm, (r(5, 4), r(4), r(4))),
    ("layer_norm 2 dims", layer_norm, (r(5, 4, 3), r(4, 3), r(4, 3))),
    ("layer_norm weight alone", layer_norm, (r(3, 5), r(5))),
    ("layer_norm plain", lambda x: F.layer_norm(x, (4,)), (r(2, 5, 4),)),
    ("layer_norm all", lambda x: F.layer_norm(x, (5, 4)), (r(5, 4),)),
    ("layer_norm bf16", inferring(layer_norm), (r(5, 4, dtype=BF16), r(4, dtype=BF16), r(4, dtype=BF16))),
    ("layer_norm inference", inferring(layer_norm), (r(5, 4), r(4), r(4))),
    ("rms_norm", rms_norm, (r(5, 4), r(4))),
    ("rms_norm plain", lambda x: F.rms_norm(x, (4, 3), eps=1e-3), (r(5, 4, 3),)),
    ("rms_norm inference", inferring(rms_norm), (r(5, 4), r(4))),
    ("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), (r(5, 6, 3), r(6), r(6))),
    ("group_norm plain", lambda x: F.group_norm(x, 2), (r(3, 4, 2, 3),)),
    ("group_norm rows", lambda x, w, b: F.group_norm(x, 2, w, b), (r(5, 8), r(8), r(8))),
    ("batch_norm", training, (r(5, 4, 3), r(4), r(4), r(4), positive)),
    ("batch_norm rows", training, (r(5, 4), r(4), r(4), r(4), positive)),
    ("batch_norm evaluating", evaluating, (r(5, 4, 3), r(4), r(4), r(4), positive)),
    ("batch_norm inference", inferring(training), (r(5, 4, 3), r(4), r(4), r(4), positive)),
    ("batch_norm no statistics", lambda x: F.batch_norm(x, None, None, training=True), (r(5, 4, 2, 2),)),
    ("instance_norm", lambda x: F.instance_norm(x), (r(5, 4, 3),)),
    ("normalize", lambda x: F.normalize(x, dim=0), (r(5, 4),)),
    ("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (r(5, 4), r(5, 1))),
    ("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), (r(5, 4),)),
    ("weight_norm last", lambda v, g: torch._weight_norm(v, g, 1), (r(5, 4), r(1, 4))),
]


@table(CASES)
def test_one_device_answer(fn, args) -> None:
    check_case(fn, args, limit=6, atol=1e-4)


@pytest.mark.parametrize("fn", [layer_norm, rms_norm])
def test_a_cut_batch_needs_no_communication(fn) -> None:
    with ranks(4) as mesh, no_communication():
        x, weight = on(mesh, r(5, 4), Shard(0), grad=True), on(mesh, r(4), Replicate())
        result = fn(x, weight)
        torch.autograd.grad(result, x, result.detach())


def test_a_cut_normalized_dim_is_not_gathered() -> None:
    def both(x, weight) -> None:
        result = layer_norm(x, weight)
        torch.autograd.grad(result, (x, weight), result.detach())

    with ranks(4) as mesh:
        x, weight = on(mesh, r(64, 128), Shard(1), grad=True), on(mesh, r(128), Shard(0), grad=True)
        said = communication(lambda: both(x, weight))
    assert len(said) == 2
    assert all("collective(s) inside" in text for text in said)


def test_batch_norm_module_counts_the_whole_batch_once() -> None:
    x = r(5, 4, 2)
    plain = torch.nn.BatchNorm1d(4)
    expected = plain(x)
    with ranks(4) as mesh:
        module = torch.nn.BatchNorm1d(4)
        for name, parameter in module.named_parameters():
            setattr(module, name, torch.nn.Parameter(on(mesh, parameter.detach())))
        for name, buffer in module.named_buffers():
            setattr(module, name, on(mesh, buffer))
        found = module(on(mesh, x, Shard(0)))
        torch.testing.assert_close(whole(found), expected.detach())
        torch.testing.assert_close(whole(module.running_mean), plain.running_mean)
        torch.testing.assert_close(whole(module.running_var), plain.running_var)
        assert whole(module.num_batches_tracked) == 1


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), ((5, 4, 3), (4,), (4,))),
        (lambda x, w, b: F.batch_norm(x, r(4), r(4).abs(), w, b), ((5, 4, 3), (4,), (4,))),
        (lambda x, w, b: F.instance_norm(x, None, None, w, b), ((5, 4, 3), (4,), (4,))),
        (lambda x, w, b: F.group_norm(x, 2, w, b), ((5, 4, 3), (4,), (4,))),
        (lambda x, w, b: F.layer_norm(x, (3,), w, b), ((5, 4, 3), (3,), (3,))),
        (lambda x, w, b: F.conv1d(x, w, b), ((5, 4, 3), (2, 4, 2), (2,))),
    ],
    ids=["batch_norm", "batch_norm evaluating", "instance_norm", "group_norm", "layer_norm", "conv1d"],
)
def test_gradients_of_some_operands(fn, shapes, wanted) -> None:
    def gradients(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.requires_grad_() for index, tensor in enumerate(tensors) if index in wanted]
        return list(torch.autograd.grad(fn(*tensors).square().sum(), leaves))

    values = [r(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    expected = gradients([value.clone() for value in values])
    with ranks(4) as mesh, implicit_replication():
        for placement in (Shard(0), Shard(1), Replicate()):
            found = gradients([on(mesh, values[0], placement), *(on(mesh, value) for value in values[1:])])
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(whole(one), other, rtol=1e-4, atol=1e-4)
