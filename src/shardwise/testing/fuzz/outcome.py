"""Run a program on a side, and return its outcome: errors by line, and all variables and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from .program import Program
from .sides import Plain


class Seen(NamedTuple):
    """The visible properties of a tensor. `value` is the global value."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    value: Tensor


class Outcome(NamedTuple):
    """The error of each line that raised one, and each variable as `Seen`; `x0.grad` is a gradient."""

    errors: dict[int, Exception]
    seen: dict[str, object]


def run(program: Program, side: Plain, value_of: Callable[[Tensor], object]) -> Outcome:
    """Run a program. `value_of` returns the global value of a tensor."""
    namespace = side.namespace()
    errors: dict[int, Exception] = {}
    torch.manual_seed(program.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, line in enumerate(program.lines):
            try:
                execute(line, namespace)
            except Exception as error:
                errors[index] = error
        return Outcome(errors, _seen(namespace, value_of))


def execute(line: str, namespace: dict[str, object]) -> None:
    """Execute one line."""
    exec(_compiled(line), namespace)


@lru_cache(maxsize=4096)
def _compiled(line: str) -> CodeType:
    return compile(line, "<program>", "exec")


def _seen(namespace: dict[str, object], value_of: Callable[[Tensor], object]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for name, value in namespace.items():
        if name[0] != "x":
            continue
        seen[name] = _look(value, value_of)
        gradient = _gradient(value)
        if gradient is not None:
            seen[f"{name}.grad"] = _look(gradient, value_of)
    return seen


def _gradient(value: object) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    try:
        return value.grad if value.is_leaf or value.retains_grad else None
    except RuntimeError:  # one of several views, after a write to its base: PyTorch refuses to look at it
        return None


def _look(value: object, value_of: Callable[[Tensor], object]) -> object:
    if not isinstance(value, Tensor):
        return value
    try:
        data = value_of(value)
        if not isinstance(data, Tensor):
            return data
        return Seen(
            value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()), value.requires_grad, data
        )
    except Exception as error:  # shards that do not fit the spec, for example
        return error


def plain_value(x: Tensor) -> Tensor:
    """Return a copy of a plain tensor: later programs may write to it."""
    return x.detach().clone()
