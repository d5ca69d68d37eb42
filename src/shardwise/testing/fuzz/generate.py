"""Random programs: statements drawn one by one, each tried on plain tensors first."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from ..values import same
from .draw import MESHES, Draw, NoChoice
from .outcome import execute
from .program import Program, names
from .sides import Plain
from .statements import TABLE, gradients
from .statements.making import leaf

LARGEST = 1e4  # of numbers: sums with larger ones lose the digits of the other terms
MOST = 2000  # elements
KEPT_ERRORS = 0.2
UNDEFINED = ("single memory location", "ZeroTensors are immutable")  # errors that other memory would not raise
_INEXACT = re.compile(r'Partial\("(sum|avg|product)"\)|special=True')
_WEIGHTS = list(accumulate(entry.weight for entry in TABLE))


def mesh_of(seed: int, meshes: Sequence[tuple[int, ...]] = MESHES) -> tuple[int, ...]:
    """Return the mesh of the program with this seed."""
    return Random(seed).choice(meshes)


def generate(seed: int, meshes: Sequence[tuple[int, ...]] = MESHES) -> Program:
    """Return the program with this seed: 1 to 4 leaves, 3 to 12 statements, and often a backward pass at the end."""
    draw = Draw(seed, meshes)
    state = State(draw)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(draw.one((1, 2, 2, 3, 4))):
            state.attempt(leaf(draw), bare=False)
        wanted = len(state.lines) + draw.random.randrange(3, 13)
        for _ in range(8 * wanted):
            if len(state.lines) >= wanted:
                break
            entry = draw.random.choices(TABLE, cum_weights=_WEIGHTS)[0]
            with suppress(NoChoice, IndexError, RuntimeError):  # no variable fits
                state.attempt(entry.write(draw), entry.bare)
        if draw.chance(0.7):
            with suppress(NoChoice, IndexError, RuntimeError):  # no variable fits
                state.attempt(f"({gradients.loss(draw)}).backward()", bare=True)
    return Program(seed, draw.mesh, tuple(state.lines))


class State:
    """The program so far, run on plain tensors."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.namespace = Plain().namespace()
        self.made = 0

    def attempt(self, text: str, bare: bool) -> None:
        """Add a line if it runs on plain tensors and its result is usable; with some probability also if it raises."""
        name = f"x{self.made}"
        line = text if bare else f"{name} = {text}"
        before = self._values(line) if bare else []
        random_state = torch.get_rng_state()
        try:
            execute(line, self.namespace)
        except Exception as error:
            drew = not torch.equal(random_state, torch.get_rng_state())  # up to the element that was refused
            if self.draw.chance(KEPT_ERRORS) and not drew and self._defined(line, before, error):
                self._add(line, bare)
            return
        if not bare:
            value = self.namespace[name]
            if isinstance(value, Tensor) and not self._usable(value):
                del self.namespace[name]
                return
            self.draw.variables[name] = value
        self._mark_inexact(line)
        self._add(line, bare)

    def _mark_inexact(self, line: str) -> None:
        """Mark the variables of a line, and those that share their memory, if the bits of one may be undefined."""
        draw, used = self.draw, set(names(line)) & self.draw.variables.keys()
        if _INEXACT.search(line) or used & draw.inexact:
            tensors = {name for name, value in draw.variables.items() if isinstance(value, Tensor)}
            memory = {draw.memory(name) for name in used & tensors}
            draw.inexact |= {name for name in tensors if draw.memory(name) in memory}

    def _values(self, line: str) -> list[Tensor]:
        used = [self.draw.variables.get(name) for name in sorted(set(names(line)))]
        return [value.detach().clone() for value in used if isinstance(value, Tensor)]

    def _defined(self, line: str, before: list[Tensor], error: Exception) -> bool:
        """Return whether an error is the same for all memory, and raised before anything is written."""
        if any(text in str(error) for text in UNDEFINED):
            return False
        return all(same(old, new) for old, new in zip(before, self._values(line), strict=False))

    def _add(self, line: str, bare: bool) -> None:
        self.lines.append(line)
        self.made += not bare

    def _usable(self, value: Tensor) -> bool:
        if value.numel() > MOST:
            return False
        if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
            return value.numel() > 0 or self.draw.chance(0.5)
        value = value.detach().abs()
        if not bool(value.isfinite().all()):
            return self.draw.chance(0.3)
        return bool(value.max() < LARGEST)
