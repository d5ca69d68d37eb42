"""One program on both sides, in the simulated world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import dedent

from torch import Tensor

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
    return difference(plain, simulated(program, side), noisy(program), ignored)


def alone(program: Program, ignored: Sequence[str] = ()) -> Failure | None:
    """Return the difference in a world of the program's own."""
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
        failure = difference(plain, found, noisy(program))
    print(f"---- {failure or 'no difference'}")
    return failure
