"""Shapes of results are right at every size, whatever sizes were seen before."""

from __future__ import annotations

import random
from functools import partial

import pytest

from shardwise.dispatch import result_meta
from shardwise.notation.patterns import Pattern
from shardwise.testing.children import Lost, in_children
from shardwise.testing.coverage.samples import PLAIN, samples
from shardwise.testing.coverage.sizes import at_other_sizes, stale_shapes

NAMES = [
    *("nn.functional.avg_pool2d", "nn.functional.glu", "nn.functional.pdist", "nn.functional.adaptive_max_pool1d"),
    *(
        "softmax",
        "var",
        "hypot",
        "cat",
        "nn.functional.pad:constant",
        "diagonal_copy",
        "linalg.cross",
        "nn.functional.unfold",
    ),
]


def test_ops_at_several_sizes_in_random_order() -> None:
    names = random.Random(0).sample(NAMES, len(NAMES))
    compared = {name: stale_shapes(name, seed=0) for name in names}
    assert all(calls > 20 for calls, _ in compared.values())
    assert [failure for _, failures in compared.values() for failure in failures] == []


def test_a_remembered_size_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = result_meta._sources
    monkeypatch.setattr(result_meta, "_sources", lambda bound, output, pattern: sources(bound, output, Pattern(())))
    name = "nn.functional.glu"
    jobs = {name: partial(stale_shapes, name, seed=0)}  # in a child process, since it spoils the caches
    answer = dict(in_children(jobs, count=1))[name]
    assert not isinstance(answer, Lost)
    assert any("aten.glu.default" in failure for failure in answer[1])


def test_samples_at_other_sizes() -> None:
    sample = samples("hypot", PLAIN, 1, 0)[0]
    shapes = {tuple(tensor.shape) for given in at_other_sizes(sample) for tensor in given.tensors}
    assert len(shapes) > len({tuple(tensor.shape) for tensor in sample.tensors})
