"""A random program as plain data: a mesh and lines of Python, which can be replayed, shrunk and printed.

>>> Program(7, (2,), ("x0 = leaf((3,), torch.float32, [Shard(0)], seed=1)", "x1 = x0.sin()"))

Each line is one statement. Variables are called `x0`, `x1`, ...; a line that makes one starts with `x3 = `. What else a
line may use is in `sides`: `torch`, `F`, placements, and a few functions such as `leaf`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"\bx\d+\b")
_TARGET = re.compile(r"(x\d+) = ")


@dataclass(frozen=True)
class Program:
    """A mesh, the seed of random numbers, and statements."""

    seed: int
    mesh: tuple[int, ...]
    lines: tuple[str, ...]

    def script(self, comment: str = "") -> str:
        """Return a Python script that runs the program on plain and on distributed tensors."""
        lines = "\n".join(f"    {line}" for line in self.lines)
        notes = "".join(f"# {line}\n" for line in comment.splitlines())
        return (
            f"{notes}from shardwise.testing.fuzz import replay\n\nreplay({self.mesh}, {self.seed}, '''\n{lines}\n''')\n"
        )


def names(line: str) -> list[str]:
    """Return the variables that a line mentions."""
    return _NAME.findall(line)


def target(line: str) -> str | None:
    """Return the variable that a line makes."""
    found = _TARGET.match(line)
    return found[1] if found else None


def reads(line: str) -> set[str]:
    """Return the variables that a line uses and does not make."""
    found = _TARGET.match(line)
    return set(names(line[found.end() :] if found else line))


def renamed(line: str, old: str, new: str) -> str:
    """Return the line with another variable in the place of one that it uses."""
    found = _TARGET.match(line)
    start = found.end() if found else 0
    return line[:start] + re.sub(rf"\b{old}\b", new, line[start:])


def without(lines: tuple[str, ...], index: int) -> tuple[str, ...]:
    """Return the lines without one of them, and without those that need what it makes."""
    gone = {target(lines[index])}
    kept = list(lines[:index])
    for line in lines[index + 1 :]:
        if reads(line) & gone:
            gone.add(target(line))
        else:
            kept.append(line)
    return tuple(kept)
