"""Make a failing program smaller: fewer lines, smaller meshes, simpler leaves and placements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .compare import Failure
from .program import Program, reads, renamed, target, without

Check = Callable[[Program], Failure | None]

_PLACEMENT = re.compile(r"Shard\(\d+\)|InterleavedShard\(\d+, \d+\)|Partial\(\"\w+\"\)")
_OPTION = re.compile(r", (grad=True|special=True|retain_graph=True|create_graph=True|keepdim=True)")
_SHAPE = re.compile(r"leaf\(\(([\d, ]*)\)")


def shrink(program: Program, failure: Failure, check: Check, most: int = 400) -> tuple[Program, Failure]:
    """Return the smallest program found that fails in the same way, and its failure, after `most` attempts."""
    tried: set[Program] = {program}
    progress = True
    while progress and most > 0:
        progress = False
        for smaller in _smaller(program):
            if smaller in tried:
                continue
            tried.add(smaller)
            most -= 1
            found = check(smaller)
            if found is not None and _alike(found, failure):
                program, failure, progress = smaller, found, True
                break
            if most <= 0:
                break
    return program, failure


def _alike(one: Failure, other: Failure) -> bool:
    """Return whether two failures are of one family: an error by what is raised, others by their kind."""
    if one.kind != other.kind:
        return False
    return one.kind != "error" or _raised(one) == _raised(other)


def _raised(failure: Failure) -> list[str]:
    return re.findall(r"\b\w*Error\b|nothing|only \w+", failure.text)


def _smaller(program: Program) -> Iterator[Program]:
    """Yield simpler programs, the ones with most removed first."""
    lines = program.lines
    for index in reversed(range(len(lines))):
        yield replace(program, lines=without(lines, index))
    for index, line in enumerate(lines):
        for operand in sorted(reads(line)):
            yield replace(program, lines=_bypassed(lines, index, operand))
    for axis in range(len(program.mesh)):
        yield from _without_axis(program, axis)
    for pattern, simple in ((_PLACEMENT, "Replicate()"), (_OPTION, "")):
        for index, line in enumerate(lines):
            for found in pattern.finditer(line):
                yield _changed(program, index, line[: found.start()] + simple + line[found.end() :])
    for index, line in enumerate(lines):
        if "InterleavedShard" in line:
            yield _changed(program, index, re.sub(r"InterleavedShard\((\d+), \d+\)", r"Shard(\1)", line))
        if shape := _SHAPE.search(line):
            sizes = [int(size) for size in shape[1].split(",") if size.strip()]
            for dim, size in enumerate(sizes):
                for less in (1, 2, 3):
                    if less < size:
                        smaller = (*sizes[:dim], less, *sizes[dim + 1 :])
                        yield _changed(program, index, line.replace(shape[0], f"leaf({smaller}", 1))
        for dtype in ("float16", "bfloat16", "float64", "complex64"):
            if f"torch.{dtype}" in line and "leaf(" in line:
                yield _changed(program, index, line.replace(f"torch.{dtype}", "torch.float32"))


def _bypassed(lines: tuple[str, ...], index: int, operand: str) -> tuple[str, ...]:
    """Return the lines without one, with one of its operands in the place of its result."""
    made = target(lines[index])
    rest = lines[index + 1 :]
    if made is not None:
        rest = tuple(renamed(line, made, operand) for line in rest)
    return (*lines[:index], *rest)


def _without_axis(program: Program, axis: int) -> Iterator[Program]:
    """Yield the program on a mesh without one axis, or with a smaller one."""
    if len(program.mesh) > 1 and not any("P(" in line for line in program.lines):
        mesh = program.mesh[:axis] + program.mesh[axis + 1 :]
        lines = tuple(_drop_placement(line, axis) for line in program.lines)
        yield replace(program, mesh=mesh, lines=lines)
    if program.mesh[axis] > 2:
        yield replace(program, mesh=(*program.mesh[:axis], 2, *program.mesh[axis + 1 :]))


_LIST = re.compile(r"\[((?:Shard|Replicate|Partial|InterleavedShard)\([^\]]*)\]")


def _drop_placement(line: str, axis: int) -> str:
    found = _LIST.search(line)
    if not found:
        return line
    items = re.findall(r"\w+\([^)]*\)", found[1])
    return f"{line[: found.start()]}[{', '.join(items[:axis] + items[axis + 1 :])}]{line[found.end() :]}"


def _changed(program: Program, index: int, line: str) -> Program:
    return replace(program, lines=(*program.lines[:index], line, *program.lines[index + 1 :]))
