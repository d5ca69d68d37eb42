"""The checker: compare a function on distributed tensors with one device, forward and backward.

>>> check(torch.softmax, torch.randn(5, 4), dim=1)          # every placement on meshes of 2, 3, 4 and 2x2 ranks
Checked(cases=28, skipped=0)
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
from torch.distributed.device_mesh import init_device_mesh

from .._torch import pytree
from ..errors import LayoutError
from ..sharding.placement import Partial, Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from ..world import common, simulate
from .values import make_dtensor

MESHES = ((2,), (3,), (4,), (2, 2))


class Checked(NamedTuple):
    """How many placements were compared, and how many were skipped because the tensor cannot have them.

    >>> check(torch.relu, torch.randn(5, 4), meshes=[(2,)]).cases
    4
    """

    cases: int
    skipped: int


class Mismatch(AssertionError):
    """The distributed answer is not the one-device answer.

    >>> check(lambda x: x[:2] if isinstance(x, DTensor) else x, torch.ones(3), meshes=[(2,)])
    Traceback (most recent call last):
    ...
    shardwise.testing.checker.Mismatch: result: torch.float32[2] instead of torch.float32[3]
    """


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

    >>> check(torch.softmax, torch.randn(5, 4), dim=1)
    Checked(cases=28, skipped=0)
    """
    call = Sample(fn, args, kwargs, grad)
    plain, tensors = call.plain(seed), call.tensors
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
                try:
                    _compare(plain, call.run(made, seed), rtol, atol)
                except Exception as error:
                    name, where = getattr(fn, "__name__", fn), [list(p) for p in choice]
                    error.add_note(f"in {name} with {where} on a mesh of {mesh_sizes}")
                    raise
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


class Answer(NamedTuple):
    """The results of a call, the gradients of the tensors among its arguments, and these tensors after the call."""

    results: list[object]
    gradients: list[Tensor | None]
    arguments: list[Tensor]


class Sample(NamedTuple):
    """One call: a function and its arguments, and whether gradients of it can be compared."""

    fn: Callable[..., object]
    args: Sequence[object]
    kwargs: Mapping[str, object]
    grad: bool = True

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    def plain(self, seed: int = 0) -> Answer:
        """Return the one-device answer. The seed chooses the weights of the results in the backward."""
        return self.run([tensor.detach().clone() for tensor in self.tensors], seed)

    def run(self, given: Sequence[Tensor], seed: int = 0) -> Answer:
        """Return the answer of the function with these tensors in the place of its own."""
        leaves = {id(own): self._leaf(tensor) for own, tensor in zip(self.tensors, given, strict=True)}
        # PyTorch refuses to write to a leaf that requires grad, so the function gets a tensor computed from it.
        seen = {key: t * 1 if t.requires_grad else t.clone() for key, t in leaves.items()}
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: seen[id(t)], (self.args, self.kwargs))
        results: list[object] = pytree.tree_leaves(self.fn(*args, **kwargs))
        gradients: list[Tensor | None] = [None] * len(leaves)
        outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        if self.grad and outputs:
            products = [output * _weight(output, seed + i) for i, output in enumerate(outputs)]
            sums = [(product.real if product.is_complex() else product).sum() for product in products]
            wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
            found = iter(torch.autograd.grad(functools.reduce(torch.add, sums), wanted, allow_unused=True))
            gradients = [next(found) if leaf.requires_grad else None for leaf in leaves.values()]
        return Answer(results, gradients, list(seen.values()))

    def _leaf(self, tensor: Tensor) -> Tensor:
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_() if self.grad and differentiable else tensor


def _weight(output: Tensor, seed: int) -> Tensor:
    """Return random weights of the shape of an output; replicated if the output is distributed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(tuple(output.shape), generator=generator, dtype=torch.float64).to(output.dtype)
    if isinstance(output, DTensor):
        return make_dtensor(weight, output.device_mesh, [Replicate()] * output.device_mesh.ndim, seed=seed)
    return weight


def _compare(plain: Answer, distributed: Answer, rtol: float, atol: float) -> None:
    for kind in Answer._fields:
        for wanted, found in zip(getattr(plain, kind), getattr(distributed, kind), strict=True):
            _same(kind.removesuffix("s"), wanted, found, rtol, atol)


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
