"""Check cached result shapes: call each op of an entry with several sizes, in random order, in one process.

>>> stale_shapes("nn.functional.avg_pool2d", seed=0)
(400, [])

The shapes that dispatch works with, which may come from a cache, are compared with those that PyTorch computes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..._torch import pytree
from ...comm.groups import adopt
from ...dispatch.local_call import tensors_in
from ...dispatch.result_meta import result_metas
from ...ops.registry import resolve
from ...sharding.mesh import MeshInfo
from ...sharding.spec import TensorMeta
from ...world import simulate
from ..calls import bound_call
from ..recording import Recorded
from .samples import PLAIN, Sample, Sweep, samples
from .trial import Trial

SAMPLES = 6
SIZES = 4  # sizes of each sample that are changed
CALLS = 40  # of each op


def stale_shapes(name: str, seed: int, sweep: Sweep = PLAIN) -> tuple[int, list[str]]:
    """Return how many calls of an entry's ops were compared, and those with wrong shapes, strides or dtypes."""
    calls: list[Recorded] = []
    seen: dict[object, int] = {}
    for sample in samples(name, sweep, SAMPLES, seed):
        for given in at_other_sizes(sample):
            try:
                recorded = Trial(given, seed).calls
            except Exception:
                continue  # PyTorch itself refuses it
            for call in recorded:
                seen[call.func] = seen.get(call.func, 0) + 1
                if seen[call.func] <= CALLS:
                    calls.append(call)
    random.Random(f"{seed} {name}").shuffle(calls)
    failures: dict[str, None] = {}
    with simulate(2):
        mesh_info = adopt(init_device_mesh("cpu", (2,)))
        for call in calls:
            difference = _difference(call, mesh_info)
            if difference:
                failures[difference] = None
    return len(calls), list(failures)


def at_other_sizes(sample: Sample) -> Iterator[Sample]:
    """Yield the sample, and the sample with all dims of one size at other sizes."""
    yield sample
    sizes = dict.fromkeys(size for tensor in sample.tensors for size in tensor.shape if size)
    for old in list(sizes)[:SIZES]:
        for new in sorted({2, 3, 4, old + 1, 2 * old} - {old}):
            args, kwargs = pytree.tree_map_only(
                Tensor, partial(_resized, old=old, new=new), (sample.args, sample.kwargs)
            )
            yield sample._replace(args=args, kwargs=kwargs)


def _resized(tensor: Tensor, old: int, new: int) -> Tensor:
    resized = tensor.detach()
    for dim, size in enumerate(tensor.shape):
        if size == old:
            resized = resized.index_select(dim, torch.arange(new) % size)
    return resized.requires_grad_(tensor.requires_grad)


def _difference(call: Recorded, mesh_info: MeshInfo) -> str:
    """Return how the result shapes that dispatch expects of a call are wrong; "" if they are right."""
    resolved = resolve(call.func)
    try:
        found = bound_call(call, mesh_info)
    except Exception:
        return ""  # an error is no stale shape
    if found is None or resolved.needs_data:
        return ""
    wanted = result_metas(call.func, *_metas(call))
    have, want = ([(tuple(t.shape), t.stride(), t.dtype) for t in tensors_in(r)] for r in (found.outputs, wanted))
    given = [(tuple(t.shape), t.dtype) for t in call.args if isinstance(t, Tensor)]
    return "" if have == want or not resolved.returns else f"{call.func} of {given}: {have} instead of {want}"


def _metas(call: Recorded) -> tuple[list[object], dict[str, object]]:
    return call.replaced(
        lambda place, value: (
            TensorMeta(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
        )
    )
