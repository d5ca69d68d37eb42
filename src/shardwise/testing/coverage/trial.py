"""One sample with one choice of placements, compared with the plain call: results, gradients, written arguments.

>>> trial = Trial(sample, seed=0)
>>> trial.compare(Simulated(), mesh, placements)     # raises Wrong, or the error of the call
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._torch import pytree
from ..._torch.ops import packet_name
from ...sharding.placement import AnyShard, Placement, Replicate, Shard
from ..calls import tolerances
from ..checker import Answer, tensors_in
from ..recording import INDEFINITE, Recorder
from .samples import Sample
from .sides import Side

NOISE = 16  # the distributed error may be this many times the rounding error of the plain call


TIED = ("topk", "kthvalue", "median", "nanmedian", "mode")
"""Functions that return the index of a value; if there are several, any of them is right."""


class Wrong(AssertionError):
    """The distributed answer is not the one-device answer."""


Make = Callable[[Tensor, int], Tensor]
"""Makes an argument of the call from a plain tensor and its number."""


class Trial:
    """A sample, and its plain answer."""

    def __init__(self, sample: Sample, seed: int) -> None:
        self.sample, self.seed = sample, seed
        with Recorder() as recorder:
            self.plain = self.again()
        self.random, self.calls = recorder.draws, list(recorder.calls.values())
        names = {packet_name(call.func) for call in self.calls}
        exact = sample.tensors[0].dtype in (torch.float32, torch.float64)
        self.tied = sample.name.partition(":")[0] in TIED and not exact
        self.indefinite = any(part in sample.name for part in INDEFINITE) or "aten::empty" in names
        self._wide: Answer | None = None

    def again(self) -> Answer:
        """Return the plain answer again, with other random numbers."""

        def make(tensor: Tensor, number: int) -> Tensor:
            order = self._order(tensor)
            return tensor.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(_inverse(order))

        return self.answer(make, lambda value, i: value)

    def answer(self, make: Make, cotangent: Make) -> Answer:
        """Return the answer of the call on tensors made by `make`, with cotangents made by `cotangent`."""
        sample = self.sample
        made = {id(t): make(self._kept(t), i) for i, t in enumerate(sample.tensors)}
        for original in sample.tensors:
            made[id(original)].requires_grad_(original.requires_grad)
        # PyTorch refuses to write to a leaf that requires grad, so the function gets a tensor computed from it.
        seen = {id(t): self._given(made[id(t)], t) for t in sample.tensors}
        out = {"out": self._outs(sample, cotangent)} if sample.variant == "out" else {}
        results = called(sample, seen, out)
        wanted = [made[id(t)] for t in sample.tensors if t.requires_grad]
        outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        found: Sequence[Tensor | None] = []
        if wanted and outputs:
            weights = [cotangent(_weight(output, self.seed + i), i) for i, output in enumerate(outputs)]
            found = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
        return Answer(results, list(found), list(seen.values()))

    def _order(self, tensor: Tensor) -> list[int]:
        """Return the dims of an argument from outermost to innermost in memory."""
        dims, variant = list(range(tensor.dim())), self.sample.variant
        if tensor.dim() < 2 or variant not in ("strided", "channels_last"):
            return dims
        if variant == "strided":
            return [*dims[:-2], dims[-1], dims[-2]]
        return [0, *dims[2:], 1]

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor that an argument is made from: its first row if it will be expanded, else all of it."""
        return tensor[:1] if self.sample.variant == "expanded" and tensor.dim() > 1 else tensor

    def _given(self, made: Tensor, original: Tensor) -> Tensor:
        """Return the argument that the function gets: a copy of the leaf, or an expanded view of it."""
        return made.expand(original.shape) if made.shape != original.shape else made.clone()

    def _outs(self, sample: Sample, make: Make) -> object:
        """Return tensors for `out=`, filled with other numbers."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (sample.args, sample.kwargs))
        results = sample.fn(*args, **kwargs)
        outs = [make(torch.full_like(t, t.dtype is torch.bool or 7), i) for i, t in enumerate(tensors_in(results))]
        return outs[0] if isinstance(results, Tensor) else outs if type(results) is list else tuple(outs)

    def compare(self, side: Side, mesh: DeviceMesh, placements: Sequence[Sequence[Placement]]) -> Answer:
        """Return the answer on distributed tensors; raises `Wrong` if it differs from the plain one."""
        chooser = random.Random(f"{self.seed} {placements}")

        def make(value: Tensor, number: int) -> Tensor:
            if self.sample.variant == "strided" and value.dim() == 1:  # every other element
                return side.make(torch.stack([value, value], 1).detach(), mesh, placements[number], number)[:, 0]
            order = self._order(value)
            moved = [Shard(order.index(p.dim)) if isinstance(p, AnyShard) else p for p in placements[number]]
            stored = value.detach().permute(order).contiguous()
            return side.make(stored, mesh, moved, number).permute(_inverse(order))

        def cotangent(value: Tensor, number: int) -> Tensor:
            options = [Replicate(), *(Shard(dim) for dim in range(value.dim()))]
            return side.make(value, mesh, [chooser.choice(options) for _ in mesh.shape], number)

        found = self.answer(make, cotangent)
        for kind in Answer._fields:
            wanted, have = getattr(self.plain, kind), getattr(found, kind)
            if len(wanted) != len(have):
                raise Wrong(f"{len(have)} {kind} instead of {len(wanted)}")
            for index, (want, value) in enumerate(zip(wanted, have, strict=True)):
                self._same(side, kind, index, want, value)
        return found

    def _same(self, side: Side, kind: str, index: int, wanted: Any, found: Any) -> None:
        what = f"{kind[:-1]} {index}"
        if not isinstance(wanted, Tensor):
            if self.random or wanted == found or wanted != wanted:
                return
            numbers = isinstance(wanted, (float, complex)) and isinstance(found, (int, float, complex))
            if not (numbers and abs(wanted - found) <= 1e-4 * abs(wanted) + 1e-5):
                raise Wrong(f"{what}: {found!r} instead of {wanted!r}")
            return
        if found is None:
            if wanted.count_nonzero():
                raise Wrong(f"{what}: nothing")
            return
        wanted = wanted.detach()
        # Replicas of undefined results may differ.
        if self.indefinite and isinstance(found, Tensor):
            value = torch.empty(found.shape, dtype=found.dtype)
        else:
            value = side.global_value(found).detach()
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise Wrong(f"{what}: {value.dtype}{list(value.shape)} instead of {wanted.dtype}{list(wanted.shape)}")
        if kind == "results" and not same_strides(wanted, found):
            strides = f"{list(found.stride())} instead of {list(wanted.stride())}"
            raise Wrong(f"{what}: strides {strides} for {list(wanted.shape)}")
        tied = self.tied and kind == "results" and index == 1
        if self.random or self.indefinite or tied or _close(value, wanted, *tolerances(wanted.dtype)):
            return
        noise = self._noise(kind, index, wanted)
        rtol, atol = tolerances(wanted.dtype)
        if noise and _close(value, wanted, rtol, atol + NOISE * noise):
            return
        raise Wrong(f"{what}: {_difference(value, wanted)}")

    def _noise(self, kind: str, index: int, wanted: Tensor) -> float:
        """Return the distance of the plain answer from that in double precision."""
        if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
            return 0.0
        if self._wide is None:
            try:
                self._wide = Trial(_widened(self.sample), self.seed).plain
            except Exception:
                return 0.0
        exact = getattr(self._wide, kind)[index]
        difference = (wanted.to(exact.dtype) - exact).detach().abs()
        difference = difference[difference.isfinite()]
        return float(difference.max()) if difference.numel() else 0.0


def called(sample: Sample, given: dict[int, Tensor], more: dict[str, object] | None = None) -> list[object]:
    """Call a sample with its tensors replaced, by id, and return the defined part of the results."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: given[id(t)], (sample.args, sample.kwargs))
    return pytree.tree_leaves(sample.definite(sample.fn(*args, **kwargs, **(more or {}))))


def _widened(sample: Sample) -> Sample:
    def wide(tensor: Tensor) -> Tensor:
        floating = torch.float64 if tensor.is_floating_point() else tensor.dtype
        kind = torch.complex128 if tensor.is_complex() else floating
        return tensor.detach().to(kind).requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(Tensor, wide, (sample.args, sample.kwargs))
    return sample._replace(args=args, kwargs=kwargs)


def _weight(output: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    steps = 2.0**8  # few digits, which no dtype rounds
    kind = torch.complex128 if output.dtype.is_complex else torch.float64
    weight = torch.randn(tuple(output.shape), generator=generator, dtype=torch.float64)
    return ((weight * steps).round() / steps).to(kind).to(output.dtype)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _close(value: Tensor, wanted: Tensor, rtol: float, atol: float) -> bool:
    if wanted.dtype.itemsize == 1 and wanted.dtype.is_floating_point:
        value, wanted = value.float(), wanted.float()
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        return torch.equal(value, wanted)
    return torch.allclose(value, wanted, rtol=rtol, atol=atol, equal_nan=True)


def same_strides(wanted: Tensor, found: Tensor) -> bool:
    """Return whether two tensors of one shape have the same strides, where these have a meaning."""
    strides = zip(wanted.shape, wanted.stride(), found.stride(), strict=True)
    return wanted.numel() == 0 or all(size == 1 or one == other for size, one, other in strides)


def _difference(value: Tensor, wanted: Tensor) -> str:
    return f"{value.flatten()[:6].tolist()} instead of {wanted.flatten()[:6].tolist()}"
