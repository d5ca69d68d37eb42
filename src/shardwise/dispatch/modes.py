"""Modes: whether an op may communicate, may run without a rule, and may take plain tensors as replicated.

>>> with explicit():
...     y = x @ w          # an error if this needs communication; the message holds the redistribute that allows it
>>> with implicit_replication():
...     y = x + plain      # the plain tensor is taken as replicated
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

from ..ops.modes import Switches, current, switched
from ..ops.modes import modes as modes
from .formulas import mark_held_result


def explicit(enabled: bool = True) -> AbstractContextManager[None]:
    """Raise an error for every op inside that needs communication; only `redistribute` and its like communicate.

    >>> x, w = zeros(8, 4, device_mesh=mesh, placements=P("dp")), zeros(4, 4, device_mesh=mesh, placements=P("dp"))
    >>> with explicit():
    ...     y = x @ w.redistribute(placements=P())     # without the redistribute, an error that names it
    >>> y.spec
    f32[8@dp, 4]
    """
    return switched(explicit="raise" if enabled else "off")


def warning_of_communication() -> AbstractContextManager[None]:
    """Warn of every op inside that needs communication, with the text of the error that `explicit` raises."""
    return switched(explicit="warn")


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors that meet distributed ones inside as replicated: the same on all ranks.

    >>> x = ones(8, 4, device_mesh=mesh, placements=P("dp"))
    >>> with implicit_replication():
    ...     y = x + torch.arange(4)                    # an error outside of the block
    >>> y.spec
    f32[8@dp, 4]
    """
    before = begin_implicit_replication()
    try:
        yield
    finally:
        end_implicit_replication(before)


def begin_implicit_replication() -> Switches:
    """Enter `implicit_replication` and return the modes before it, for `end_implicit_replication`.

    For overrides of ops, where the context manager would take longer than the rest of the override.
    """
    before = current.get()
    current.set(_replicating(before))
    return before


def end_implicit_replication(before: Switches) -> None:
    """Leave `implicit_replication`."""
    mark_held_result()
    current.set(before)


@cache
def _replicating(modes: Switches) -> Switches:
    return modes._replace(implicit_replication=True)


def strict_ops() -> AbstractContextManager[None]:
    """Raise an error for every op inside that has no rule, instead of running it on gathered inputs.

    >>> with strict_ops():
    ...     y = ones(8, 4, device_mesh=mesh, placements=P("dp")) + 1
    """
    return switched(strict_ops=True)
