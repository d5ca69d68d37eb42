"""Plans of random ops, one line each: what every rank must choose alike. Run as a program, it prints them all."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.comm.groups import adopt
from shardwise.comm.redistribute import plan_redistribution
from shardwise.dispatch.arguments import Argument, Constant
from shardwise.dispatch.call_plan import plan_call
from shardwise.dispatch.result_meta import NoRule
from shardwise.errors import ShardwiseError
from shardwise.ops.registry import resolve
from shardwise.sharding.layout import Factor, Layout
from shardwise.sharding.mesh import MeshInfo
from shardwise.sharding.spec import DTensorSpec, contiguous_meta

aten = torch.ops.aten
MESHES = ((8,), (2, 4), (2, 2, 2))
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
REDUCTIONS = ("sum", "sum", "avg", "max", "min", "product")
ONE = [aten.sin, aten.neg, aten.relu, aten.exp, aten.clone, aten.tril, aten.abs, aten.t, aten.zeros_like]
TWO = [aten.add, aten.sub, aten.mul, aten.maximum, aten.minimum, aten.div, aten.atan2, aten.eq]
SUMS = [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction]
ALONG = [aten._softmax.default, aten.cumsum.default, aten.sort.default, aten.argmax.default, aten.select.int]


class Drawn:
    """Random calls: an op, its arguments, and random layouts of its tensors."""

    def __init__(self, mesh_info: MeshInfo, seed: int) -> None:
        self.mesh_info, self.draw = mesh_info, random.Random(seed)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Argument:
        draw, axes = self.draw, list(range(len(self.mesh_info.sizes)))
        draw.shuffle(axes)
        cuts: list[list[int]] = [[] for _ in shape]
        partial = []
        for axis in axes:
            kind = draw.random()
            if kind < 0.5 and shape:
                cuts[draw.randrange(len(shape))].append(axis)
            elif kind < 0.75 and dtype.is_floating_point:
                partial.append((axis, draw.choice(REDUCTIONS)))
        dims = [(Factor(size, tuple(cut)),) for size, cut in zip(shape, cuts, strict=True)]
        meta = contiguous_meta(shape, dtype)
        layout = Layout.make(self.mesh_info.sizes, dims, tuple(partial))
        return Argument(meta, DTensorSpec.from_layout(self.mesh_info, layout, meta))

    def shape(self, ndim: int) -> tuple[int, ...]:
        return tuple(self.draw.choice(SIZES) for _ in range(ndim))

    def call(self) -> tuple[Any, list[object]]:
        draw, shape = self.draw, self.shape(self.draw.randint(2, 3))
        dim, (m, k, n) = draw.randrange(len(shape)), self.shape(3)
        kind = draw.randrange(12)
        if kind == 0:
            op = draw.choice(ONE)
            return op.default, [self.tensor(*(shape[:2] if op is aten.t else shape))]
        if kind in (1, 2):
            op = draw.choice(TWO)
            other = shape if draw.random() < 0.6 else shape[1:]
            overload = op.Tensor if "Tensor" in op.overloads() else op.default
            return overload, [self.tensor(*shape), self.tensor(*other)]
        if kind == 3:
            op = draw.choice(SUMS)
            return op, [self.tensor(*shape), [dim]]
        if kind == 4:
            op = draw.choice(ALONG)
            more = {aten._softmax.default: [False], aten.select.int: [shape[dim] - 1]}.get(op, [])
            return op, [self.tensor(*shape), dim, *more]
        if kind == 5:
            return aten.mm.default, [self.tensor(m, k), self.tensor(k, n)]
        if kind == 6:
            return aten.addmm.default, [self.tensor(n), self.tensor(m, k), self.tensor(k, n)]
        if kind == 7:
            return aten.linear.default, [self.tensor(2, m, k), self.tensor(n, k), self.tensor(n)]
        if kind == 8:
            return aten.cat.default, [[self.tensor(*shape), self.tensor(*shape)], dim]
        if kind == 9:
            return aten.view.default, [self.tensor(m, k, n), [m * k, n] if draw.random() < 0.5 else [m, k * n]]
        if kind == 10:
            return aten.embedding.default, [self.tensor(m, k), self.tensor(n, dtype=torch.int64)]
        return aten.where.self, [self.tensor(*shape, dtype=torch.bool), self.tensor(*shape), self.tensor(*shape[1:])]


def lines(count: int, backwards: bool = False) -> Iterator[str]:
    """Plans of `count` random ops: the specs in which operands are taken, the steps to them, and the results.

    Planned `backwards`, they come in the same order: what was planned before must not matter.
    """
    with shardwise.simulate(8):
        for number, sizes in enumerate(MESHES):
            mesh_info = adopt(init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)]))
            drawn = Drawn(mesh_info, number)
            calls = [drawn.call() for _ in range(count // len(MESHES) + 1)]
            step = -1 if backwards else 1
            made = [f"{func} {_given(args)} => {_plan(func, args, mesh_info)}" for func, args in calls[::step]]
            yield from made[::step]


def _flat(args: list[Any]) -> list[Argument]:
    return [a for value in args for a in (value if isinstance(value, list) else [value]) if isinstance(a, Argument)]


def _given(args: list[Any]) -> str:
    return ", ".join(repr(argument.spec) for argument in _flat(args))


def _plan(func: Any, args: list[Any], mesh_info: MeshInfo) -> str:
    try:
        plan = plan_call(resolve(func), args, {}, mesh_info)
    except NoRule:
        return "no rule"
    except (ShardwiseError, RuntimeError, IndexError) as error:
        return type(error).__name__
    treated = [t for value in plan.args for t in (value if isinstance(value, list) else [value])]
    texts = []
    for given, treatment in zip(_flat(args), [t for t in treated if not isinstance(t, Constant)], strict=False):
        if isinstance(treatment, DTensorSpec):
            assert given.spec is not None
            texts.append(f"{treatment!r} by {plan_redistribution(given.spec, treatment)!r}")
    return f"{'; '.join(texts)} -> {plan.results!r} {plan.communication}"


if __name__ == "__main__":
    for line in lines(int(sys.argv[1]), "backwards" in sys.argv):
        print(line)
