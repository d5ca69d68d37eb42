"""Run one program on both sides, in the simulated world, and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import dedent

from torch import Tensor

from ..._torch.view_history import views_recorded_as_ops
from ...tensor.dtensor import DTensor
from ...world import simulate
from ..values import assemble
from .compare import Failure, difference
from .noise import noisy
from .outcome import Outcome, plain_value, run
from .program import Program
from .sides import Distributed, Plain


def simulated_value(x: Tensor) -> object:
    """Return the global value of a distributed tensor, assembled without communication."""
    return assemble(x) if isinstance(x, DTensor) else f"a {type(x).__name__} that is not distributed"


def simulated(program: Program, side: Distributed) -> Outcome:
    """Run a program on distributed tensors of the running simulated world."""
    side.use(program.mesh)
    return run(program, side, simulated_value)


def trial(program: Program, side: Distributed, ignored: Sequence[str] = ()) -> Failure | None:
    """Return how a program on distributed tensors of the running simulated world differs from plain ones."""
    plain = run(program, Plain(), plain_value)
    return _compared(program, plain, simulated(program, side), ignored)


def _compared(program: Program, plain: Outcome, found: Outcome, ignored: Sequence[str] = ()) -> Failure | None:
    """Return the difference of two outcomes.

    After a write autograd records the views of a plain tensor again as `as_strided`, and those of a subclass as the ops
    that they were. Gradients that pass them have other strides, so plain views are recorded as their ops, too.
    """
    failure = difference(plain, found, noisy(program), ignored)
    if failure is not None and failure.kind == "stride":
        with views_recorded_as_ops():
            plain = run(program, Plain(), plain_value)
        return difference(plain, found, noisy(program), ignored)
    return failure


def alone(program: Program, ignored: Sequence[str] = ()) -> Failure | None:
    """Return how a program differs from plain tensors, in a new world."""
    with simulate(math.prod(program.mesh)):
        return trial(program, Distributed(), ignored)


def replay(mesh: Sequence[int], seed: int, lines: str) -> Failure | None:
    """Run a program from its text, and print both outcomes and the difference."""
    program = Program(seed, tuple(mesh), tuple(dedent(lines).strip().splitlines()))
    with simulate(math.prod(program.mesh)):
        plain, found = run(program, Plain(), plain_value), simulated(program, Distributed())
        for title, outcome in (("plain tensors", plain), ("distributed tensors", found)):
            print(f"---- {title}")
            for line, error in outcome.errors.items():
                print(f"{program.lines[line]}\n    raises {type(error).__name__}: {error}")
            for name, seen in outcome.seen.items():
                print(f"{name}: {seen}")
        failure = _compared(program, plain, found)
    print(f"---- {failure or 'no difference'}")
    return failure
