"""The checker: a function on distributed tensors gives the one-device answer, forward and backward.

>>> check(torch.softmax, torch.randn(5, 4), dim=1)          # every placement on meshes of 2, 3, 4 and 2x2 ranks
Checked(cases=50, skipped=0)
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch import pytree
from ..errors import LayoutError
from ..sharding.placement import Partial, Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from ..world import common, simulate
from .values import make_dtensor

MESHES = ((2,), (3,), (4,), (2, 2))


class Checked(NamedTuple):
    """How many placements were compared, and how many were skipped because the tensor cannot have them."""

    cases: int
    skipped: int


class Mismatch(AssertionError):
    """The distributed answer is not the one-device answer."""


def check(
    fn: Callable[..., object],
    *args: object,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    partial: Sequence[str] = ("sum",),
    limit: int = 60,
    grad: bool = True,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    seed: int = 0,
    placements: Sequence[Sequence[Sequence[Placement]]] | None = None,
    **kwargs: object,
) -> Checked:
    """Compare `fn` on distributed tensors with `fn` on the plain ones, for every placement of every tensor argument.

    Tensors may be anywhere in `args` and `kwargs`, also in lists. On each mesh at most `limit` combinations are tried,
    chosen by `seed`. Floating-point tensors are also tried as Partial. With `grad`, gradients of a random weighted
    sum of all floating-point results are compared too, and so are tensors that `fn` writes.
    """
    plain = plain_run(fn, args, kwargs, grad, seed)
    tensors = tensors_in((args, kwargs))
    cases = skipped = 0
    for mesh_sizes in meshes:
        with simulate(math.prod(mesh_sizes)):
            mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=("a", "b", "c", "d")[: len(mesh_sizes)])
            for choice in _choices(tensors, mesh_sizes, partial, limit, seed, placements):
                try:
                    pairs = zip(tensors, choice, strict=True)
                    made = [make_dtensor(t.detach(), mesh, p, seed=i) for i, (t, p) in enumerate(pairs)]
                except LayoutError:
                    skipped += 1
                    continue
                _compare(fn, args, kwargs, made, plain, grad, seed, choice, mesh, rtol, atol)
                cases += 1
    return Checked(cases, skipped)


def _choices(
    tensors: Sequence[Tensor],
    mesh_sizes: tuple[int, ...],
    partial: Sequence[str],
    limit: int,
    seed: int,
    placements: Sequence[Sequence[Sequence[Placement]]] | None,
) -> Iterator[tuple[Sequence[Placement], ...]]:
    """Yield placements for all tensors: all combinations, or a sample of them."""
    if placements is not None:
        yield from (tuple(choice) for choice in placements if len(choice[0]) == len(mesh_sizes))
        return
    options = []
    for tensor in tensors:
        single: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
        if tensor.is_floating_point() or tensor.is_complex():
            single += [Partial(op) for op in partial if not (tensor.is_complex() and op in ("max", "min"))]
        options.append(list(itertools.product(single, repeat=len(mesh_sizes))))
    total = math.prod(len(choices) for choices in options)
    if total <= limit:
        yield from itertools.product(*options)
        return
    chooser = random.Random(f"{seed} {mesh_sizes} {[tuple(t.shape) for t in tensors]}")
    for _ in range(limit):
        yield tuple(chooser.choice(choices) for choices in options)


class _Run(NamedTuple):
    results: list[object]
    gradients: list[Tensor | None]
    inputs: list[Tensor]


def plain_run(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], grad: bool, seed: int
) -> _Run:
    """Return the one-device answer: results, gradients, and the arguments after the call."""
    copies = {id(t): _leaf(t.detach().clone(), grad) for t in tensors_in((args, kwargs))}
    return _run(fn, args, kwargs, copies, list(copies.values()), grad, seed)


def _leaf(tensor: Tensor, grad: bool) -> Tensor:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.requires_grad_() if grad and differentiable else tensor


def _run(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    given: dict[int, Tensor],
    leaves: list[Tensor],
    grad: bool,
    seed: int,
) -> _Run:
    # PyTorch refuses to write to a leaf that requires grad, so the function gets a tensor computed from it.
    seen = {key: t * 1 if t.requires_grad else t.clone() for key, t in given.items()}
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: seen[id(t)], (args, kwargs))
    results: list[object] = pytree.tree_leaves(fn(*args, **kwargs))
    gradients: list[Tensor | None] = [None] * len(leaves)
    outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if grad and outputs:
        products = [output * _weight(output, seed + i) for i, output in enumerate(outputs)]
        sums = [(product.real if product.is_complex() else product).sum() for product in products]
        total = functools.reduce(torch.add, sums)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return _Run(results, gradients, list(seen.values()))


def _weight(output: Tensor, seed: int) -> Tensor:
    """Return random weights of the shape of an output; replicated if the output is distributed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(tuple(output.shape), generator=generator, dtype=torch.float64).to(output.dtype)
    if isinstance(output, DTensor):
        return make_dtensor(weight, output.device_mesh, [Replicate()] * output.device_mesh.ndim, seed=seed)
    return weight


def _compare(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    made: list[DTensor],
    plain: _Run,
    grad: bool,
    seed: int,
    choice: Sequence[Sequence[Placement]],
    mesh: DeviceMesh,
    rtol: float,
    atol: float,
) -> None:
    originals = tensors_in((args, kwargs))
    given = {id(original): _leaf(tensor, grad) for original, tensor in zip(originals, made, strict=True)}
    where = f"{getattr(fn, '__name__', fn)} with {[list(p) for p in choice]} on a mesh of {tuple(mesh.shape)}"
    try:
        run = _run(fn, args, kwargs, given, list(given.values()), grad, seed)
        pairs = [*zip(plain.results, run.results, strict=True)]
        for kind, wanted, found in (
            *(("result", w, f) for w, f in pairs),
            *(("gradient", w, f) for w, f in zip(plain.gradients, run.gradients, strict=True)),
            *(("argument", w, f) for w, f in zip(plain.inputs, run.inputs, strict=True)),
        ):
            _same(kind, wanted, found, rtol, atol)
    except Exception as error:
        error.add_note(f"in {where}")
        raise


def _same(kind: str, wanted: object, found: object, rtol: float, atol: float) -> None:
    if not isinstance(wanted, Tensor):
        if isinstance(wanted, float):
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)
        elif wanted != found:
            raise Mismatch(f"{kind}: {found!r} instead of {wanted!r}")
        return
    if found is None:
        if wanted.count_nonzero():
            raise Mismatch(f"{kind}: nothing instead of {wanted}")
        return
    if not isinstance(found, Tensor):
        raise Mismatch(f"{kind}: {found!r} instead of a tensor")
    value = found
    if isinstance(found, DTensor):
        with torch.no_grad():
            value = common(found.full_tensor())
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        raise Mismatch(f"{kind}: {value.dtype}{list(value.shape)} instead of {wanted.dtype}{list(wanted.shape)}")
    torch.testing.assert_close(
        value, wanted.detach(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{kind}: {m}"
    )


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [value for value in pytree.tree_leaves(tree) if isinstance(value, Tensor)]
