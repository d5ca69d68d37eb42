"""100 ways in which one rank of four does something else than the others.

Each is a function of an `Env` whose `odd` says whether this rank is the one. What each rank does next is on lines of
its own, so that the lines that the watch names can be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard


@dataclass
class Env:
    """What a case works with."""

    mesh: Any
    rank: int
    odd: bool

    def shard(self, *shape: int, dim: int = 0, dtype: torch.dtype = torch.float32) -> DTensor:
        return sw.distribute_tensor(torch.ones(shape or (8, 8), dtype=dtype), self.mesh, self.placed(Shard(dim)))

    def replica(self, *shape: int) -> DTensor:
        return sw.distribute_tensor(torch.ones(shape or (8, 8)), self.mesh, self.placed(Replicate()))

    def placed(self, placement: Any) -> list[Any]:
        return [placement] + [Replicate()] * (self.mesh.ndim - 1)

    def finish(self, x: Any) -> None:
        """What comes after, and would hang or be wrong."""
        for _ in range(3):
            x.sum().full_tensor()


Case = Callable[[Env], None]
CASES: dict[str, tuple[Case, int, int]] = {}
"""By name: the case, the rank that differs, and the number of dims of the mesh."""
RAISED = "raises"
"""Cases of this kind raise an error on one rank."""


def add(kind: str, name: str, case: Case) -> None:
    count = len(CASES)
    CASES[f"{kind}: {name}"] = case, count % 4, 1 + count % 2


# ---- a skipped op --------------------------------------------------------------------------------------------------

LOCAL: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x * 2,
    "add": lambda x: x + x,
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(1),
    "mm": lambda x: x @ x.t().redistribute(placements=[Replicate()] * x.device_mesh.ndim),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "clone": torch.clone,
    "abs": torch.abs,
    "negative": torch.neg,
    "cumsum": lambda x: x.cumsum(1),
    "in place": lambda x: x.add_(1),
    "where": lambda x: torch.where(x > 0, x, -x),
}


def skipping(op: Callable[[Any], Any]) -> Case:
    def case(env: Env) -> None:
        x = env.shard()
        if not env.odd:
            op(x)
        env.finish(x)

    return case


for name, op in LOCAL.items():
    add("skipped op", name, skipping(op))


def _skip_in_backward(env: Env) -> None:
    x = env.shard().requires_grad_()
    y = (x * 2).sum()
    if not env.odd:
        y.backward()
    env.finish(x)


def _skip_optimizer(env: Env) -> None:
    x = env.shard().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    (x * 2).sum().backward()
    if not env.odd:
        optimizer.step()
    env.finish(x)


add("skipped op", "backward", _skip_in_backward)
add("skipped op", "optimizer", _skip_optimizer)

MOVES: dict[str, Callable[[Env, Any], Any]] = {
    "full_tensor": lambda env, x: x.full_tensor(),
    "all-reduce": lambda env, x: x.sum().redistribute(placements=[Replicate()] * env.mesh.ndim),
    "all-to-all": lambda env, x: x.redistribute(placements=env.placed(Shard(1))),
    "async": lambda env, x: x.redistribute(placements=env.placed(Replicate()), async_op=True).to_local(),
    "dist.all_reduce": lambda env, x: dist.all_reduce(torch.ones(4)),
    "dist.barrier": lambda env, x: dist.barrier(),
    "dist.all_gather_object": lambda env, x: dist.all_gather_object([None] * 4, env.rank),
    "dist.broadcast": lambda env, x: dist.broadcast(torch.ones(3), src=0),
}


def skipping_move(move: Callable[[Env, Any], Any]) -> Case:
    def case(env: Env) -> None:
        x = env.shard()
        if not env.odd:
            move(env, x)
        env.finish(x)

    return case


for name, move in MOVES.items():
    add("skipped collective", name, skipping_move(move))

# ---- another shape, dtype, placement -------------------------------------------------------------------------------


def two_ways(make: Callable[[Env, bool], Any], use: Callable[[Any], Any]) -> Case:
    def case(env: Env) -> None:
        x = make(env, env.odd)
        use(x)
        env.finish(env.shard())

    return case


USES: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x * 2,
    "full_tensor": lambda x: x.full_tensor(),
    "sum": lambda x: x.sum().full_tensor(),
}
SHAPES: dict[str, Callable[[Env, bool], Any]] = {
    "replicas": lambda env, odd: DTensor.from_local(torch.ones(6 if odd else 5), env.mesh, env.placed(Replicate())),
    "rows": lambda env, odd: DTensor.from_local(torch.ones(3 if odd else 2, 4), env.mesh, env.placed(Shard(0))),
    "columns": lambda env, odd: DTensor.from_local(torch.ones(4, 3 if odd else 2), env.mesh, env.placed(Shard(1))),
    "a slice": lambda env, odd: env.replica()[: 3 if odd else 4] + 0,
}
DTYPES: dict[str, Callable[[Env, bool], Any]] = {
    "double": lambda env, odd: env.shard().to(torch.float64 if odd else torch.float32).clone(),
    "half": lambda env, odd: env.replica().to(torch.bfloat16 if odd else torch.float16),
    "integers": lambda env, odd: env.shard(dtype=torch.int32 if odd else torch.int64),
}
PLACES: dict[str, Callable[[Env, bool], Any]] = {
    "rows or columns": lambda env, odd: env.shard(dim=1 if odd else 0),
    "sharded or replicated": lambda env, odd: env.replica() if odd else env.shard(),
    "partial": lambda env, odd: DTensor.from_local(
        torch.ones(4), env.mesh, env.placed(Partial() if odd else Replicate())
    ),
    "reduction": lambda env, odd: DTensor.from_local(
        torch.ones(4), env.mesh, env.placed(Partial("max" if odd else "sum"))
    ),
}
for kind, makes in (("other shape", SHAPES), ("other dtype", DTYPES), ("other placement", PLACES)):
    for name, make in makes.items():
        for use_name, use in USES.items():
            add(kind, f"{name}, {use_name}", two_ways(make, use))

# ---- another order -------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple[Callable[[Env, Any], Any], Callable[[Env, Any], Any]]] = {
    "ops": (lambda env, x: x * 2, lambda env, x: x + 1),
    "collectives": (MOVES["full_tensor"], MOVES["all-to-all"]),
    "op and collective": (lambda env, x: x.exp(), MOVES["full_tensor"]),
    "dist calls": (MOVES["dist.barrier"], MOVES["dist.all_reduce"]),
    "dist call and redistribution": (MOVES["dist.broadcast"], MOVES["all-to-all"]),
    "reductions": (lambda env, x: x.sum().full_tensor(), lambda env, x: x.amax().full_tensor()),
    "sizes": (lambda env, x: dist.all_reduce(torch.ones(4)), lambda env, x: dist.all_reduce(torch.ones(5))),
    "gather and scatter": (
        lambda env, x: x.redistribute(placements=env.placed(Replicate())),
        lambda env, x: x.sum(0).redistribute(placements=env.placed(Shard(0))),
    ),
}


def swapped(first: Callable[[Env, Any], Any], second: Callable[[Env, Any], Any]) -> Case:
    def case(env: Env) -> None:
        x = env.shard()
        if env.odd:
            second(env, x)
            first(env, x)
        else:
            first(env, x)
            second(env, x)
        env.finish(x)

    return case


for name, (first, second) in STEPS.items():
    add("other order", name, swapped(first, second))
_name = "other order: op and collective"  # on two axes they belong to different groups, and either order is right
CASES[_name] = (*CASES[_name][:2], 1)


def _groups_in_turn(env: Env) -> None:
    """Two groups, each used by the same ranks in the same way, but in another order."""
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1])]
    order = groups if env.rank else groups[::-1]
    for group in order[: 2 if env.rank < 2 else 1]:
        dist.all_reduce(torch.ones(2), group=group)


CASES["other order: two groups"] = _groups_in_turn, 0, 1

# ---- leaving early -------------------------------------------------------------------------------------------------


def leaving(before: Callable[[Env, Any], Any], after: Callable[[Env, Any], Any]) -> Case:
    def case(env: Env) -> None:
        x = env.shard()
        before(env, x)
        if env.odd:
            return
        after(env, x)
        env.finish(x)

    return case


for name, (first, second) in STEPS.items():
    add("early return", name, leaving(first, second))

# ---- an error on one rank ------------------------------------------------------------------------------------------


def _values(env: Env, good: list[int], bad: list[int]) -> Tensor:
    return torch.tensor(bad if env.odd else good)


def _index(env: Env) -> None:
    table, rows = env.replica(), _values(env, [0, 1], [0, 99])
    F.embedding(DTensor.from_local(rows, env.mesh, env.placed(Shard(0))), table).sum().full_tensor()


def _gather(env: Env) -> None:
    rows = DTensor.from_local(_values(env, [0, 1], [0, 99]), env.mesh, env.placed(Shard(0)))
    env.replica()[rows].sum().full_tensor()


def _division(env: Env) -> None:
    x = DTensor.from_local(_values(env, [1, 1], [1, 0]), env.mesh, env.placed(Shard(0)))
    (x // x).sum().full_tensor()


def _target(env: Env) -> None:
    target = DTensor.from_local(_values(env, [0, 1], [0, 99]), env.mesh, env.placed(Shard(0)))
    scores = DTensor.from_local(torch.zeros(2, 4), env.mesh, env.placed(Shard(0)))
    F.cross_entropy(scores, target).full_tensor()


def _one_hot(env: Env) -> None:
    F.one_hot(_values(env, [0, 1], [0, 99]), 4)
    env.finish(env.shard())


def _own_check(env: Env) -> None:
    if env.odd:
        raise ValueError("a batch that has no tokens")
    env.finish(env.shard())


def _in_hook(env: Env) -> None:
    x = env.shard().requires_grad_()
    x.register_hook(lambda grad: 1 / 0 if env.odd else None)
    (x * 2).sum().backward()
    env.finish(x)


def _assertion(env: Env) -> None:
    env.finish(env.shard())
    assert not env.odd, "loss is NaN"
    env.finish(env.shard())


def _key(env: Env) -> None:
    {"tokens": 1}["labels" if env.odd else "tokens"]
    env.finish(env.shard())


def _size(env: Env) -> None:
    local = torch.ones(3 if env.odd else 4)
    DTensor.from_local(local + torch.ones(4), env.mesh, env.placed(Shard(0))).sum().full_tensor()


def _in_loop(env: Env) -> None:
    for step in range(20):
        env.finish(env.shard())
        if env.odd and step == 7:
            [][step]


ERRORS = {
    "index": _index, "gather": _gather, "division": _division, "target": _target, "one hot": _one_hot,
    "own check": _own_check, "hook": _in_hook, "assertion": _assertion, "key": _key, "size": _size, "loop": _in_loop,
}  # fmt: skip
for name, case in ERRORS.items():
    add(RAISED, name, case)

# ---- generators ----------------------------------------------------------------------------------------------------


def reseeding(change: Callable[[], Any], draw: Callable[[Env], Any]) -> Case:
    def case(env: Env) -> None:
        torch.manual_seed(3)
        sw.rand(4, device_mesh=env.mesh, placements=env.placed(Shard(0)))
        if env.odd:
            change()
        x = draw(env)
        env.finish(x)

    return case


CHANGES: dict[str, Callable[[], Any]] = {
    "seed": lambda: torch.manual_seed(4),
    "a draw": lambda: torch.rand(1),
    "state": lambda: torch.set_rng_state(torch.Generator().manual_seed(9).get_state()),
}
DRAWS: dict[str, Callable[[Env], Any]] = {
    "rand": lambda env: sw.rand(8, 8, device_mesh=env.mesh, placements=env.placed(Shard(0))),
    "dropout": lambda env: F.dropout(env.shard(), 0.5),
    "large": lambda env: sw.randn(512, 256, device_mesh=env.mesh, placements=env.placed(Shard(0))),
}
for name, change in CHANGES.items():
    for draw_name, draw in DRAWS.items():
        add("reseeded generator", f"{name}, {draw_name}", reseeding(change, draw))

# ---- uneven shards -------------------------------------------------------------------------------------------------


def uneven(use: Callable[[Env, Any], Any], dim: int) -> Case:
    def case(env: Env) -> None:
        shape = [4, 4]
        shape[dim] = 3 if env.odd else 4
        x = DTensor.from_local(torch.ones(shape), env.mesh, env.placed(Shard(dim)))
        use(env, x)
        env.finish(x)

    return case


for name in ("full_tensor", "all-to-all", "all-reduce", "async"):
    for dim in (0, 1):
        add("uneven from_local", f"{name}, dim {dim}", uneven(MOVES[name], dim))
