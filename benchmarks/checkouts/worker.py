"""Times rows of the benchmarks of one checkout: run by `checkouts`, with the checkout's modules on the path."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

Row = tuple[Callable[[], object], int]
"""What is timed, and how often it is called in one turn."""


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def op_rows(lib: Any, mesh: Any) -> Iterator[tuple[str, Row]]:
    eager = importlib.import_module("eager")
    sharded, replicated = [lib.Shard(0)], [lib.Replicate()]
    for grad in (False, True):
        suffix = " with grad" if grad else ""
        for name, case in eager.OPS.items():
            tensors = eager.distributed(lib, mesh, case, "cpu", grad)
            yield name + suffix, (lambda case=case, tensors=tensors: case.run(*tensors), 100)
        tensor = lib.distribute_tensor(torch.randn(16, 64), mesh, sharded).requires_grad_(grad)
        local = torch.randn(4, 64, requires_grad=grad)
        yield f"redistribute{suffix}", (lambda x=tensor: x.redistribute(placements=replicated), 100)
        yield f"from_local{suffix}", (lambda x=local: lib.DTensor.from_local(x, mesh, sharded, run_check=False), 100)
        yield f"to_local{suffix}", (lambda x=tensor: x.to_local(), 100)
    leaf = lib.distribute_tensor(torch.zeros(16, 16), mesh, [lib.Shard(0)]).requires_grad_()
    gradient = lib.distribute_tensor(torch.zeros(16, 16), mesh, replicated)
    yield (
        "redistribute and backward",
        (lambda: torch.autograd.grad(leaf.redistribute(mesh, replicated), leaf, gradient), 100),
    )


def step_rows(lib: Any, mesh: Any) -> Iterator[tuple[str, Row]]:
    training = importlib.import_module("training")
    parameters = []
    for i in range(50):
        data = lib.distribute_tensor(torch.randn(16, 16), mesh, [lib.Shard(0) if i % 2 else lib.Replicate()])
        parameters.append(torch.nn.Parameter(data))
        parameters[-1].grad = torch.ones_like(data)
    yield "AdamW, 50 params", (torch.optim.AdamW(parameters, foreach=True).step, 5)
    yield "step, local outputs", (training.local_outputs("shardwise", mesh, "cpu"), 3)
    yield "step, all distributed", (training.all_distributed("shardwise", mesh, "cpu"), 3)


def serve_ops() -> None:
    """Time a row whenever its name comes in."""
    lib = importlib.import_module("shardwise")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    rows = dict([*op_rows(lib, mesh), *step_rows(lib, mesh)])
    for call, _ in rows.values():
        for _ in range(10):
            call()
    say(list(rows))
    for line in sys.stdin:
        call, number = rows[json.loads(line)]
        for _ in range(number // 5 + 1):  # as in eager.py a row is timed warm, though the rows take turns
            call()
        begin = time.perf_counter()
        for _ in range(number):
            call()
        say((time.perf_counter() - begin) / number * 1e6)


def first_calls(turn: int) -> None:
    """Time all samples of all rows once.

    Python's garbage collector runs after a number of allocations, so in equal processes it always interrupts the same
    samples. Objects that are kept from the start, a different number in each turn, make it interrupt others.
    """
    kept = [[] for _ in range(97 * turn)]  # type: ignore[var-annotated]
    cold, lib = importlib.import_module("cold"), importlib.import_module("shardwise")
    found: dict[str, list[float]] = {}
    for title, place in (("as in programs", cold.like_a_program), ("at random", cold.at_random)):
        for axes in (1, 2, 3, 4):
            dist.init_process_group("fake", rank=0, world_size=4**axes, store=FakeStore())
            mesh = dist.init_device_mesh("cpu", (4,) * axes)
            for name, (op, shapes) in cold.OPS.items():
                cold.first_calls(lib, name, mesh, 1, lambda lib, _, axes, __: [[lib.Replicate()] * axes] * 3)
                for sample in range(cold.SAMPLES["shardwise"]):
                    placements = place(lib, name, axes, sample)
                    for new, kind in enumerate(("new specs", "new size")):
                        pairs = zip(shapes(256 + 8 * (2 * sample + new)), placements, strict=False)
                        tensors = [lib.zeros(*shape, device_mesh=mesh, placements=p) for shape, p in pairs]
                        milliseconds = cold.timed(lambda op=op, tensors=tensors: op(*tensors))
                        found.setdefault(f"{name}, {axes}-D, {title}, {kind}", []).append(milliseconds * 1e3)
            dist.destroy_process_group()
    say(found)
    del kept


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if sys.argv[1] == "ops":
        serve_ops()
    else:
        first_calls(int(sys.argv[2]))
