"""The user's options for attention over a sequence that is sharded by position.

>>> with attention_over_sequence(method="ring", zigzag=True):
...     F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from .._torch.tls import ThreadValue
from ..errors import InputError

Method = Literal["ring", "heads", "gather"]
"""`ring`: blocks of keys and values travel from rank to rank. `heads`: an all-to-all gives each rank all positions of
some heads, and another brings the output back. `gather`: every rank gathers all keys and values."""


class RotateMethod(enum.Enum):
    """How keys and values travel between ranks, by PyTorch's names."""

    ALL_TO_ALL = 1
    ALL_GATHER = 2


@dataclass
class ContextOptions:
    """Options of this process, by PyTorch's names. Without a rotate method, the cost model chooses how keys travel."""

    convert_to_f32: bool = True
    enable_load_balance: bool = False
    rotate_method: RotateMethod | None = None


options = ContextOptions()


class SequenceMode(NamedTuple):
    """The options of a block: the method (None: by cost), and whether sequences are in head-tail order."""

    method: Method | None = None
    zigzag: bool = False


_mode = ThreadValue("sequence attention", SequenceMode())


def sequence_mode() -> SequenceMode:
    """Return the options of this thread's block; if they have no method, `rotate_method` of this process decides."""
    mode = _mode.get()
    if mode.method is None and options.rotate_method is not None:
        return mode._replace(method="ring" if options.rotate_method is RotateMethod.ALL_TO_ALL else "gather")
    return mode


@contextmanager
def attention_over_sequence(method: Method | None = None, zigzag: bool | None = None) -> Iterator[None]:
    """Set the method of attention over positions that are sharded, inside the block; None leaves it unchanged.

    With `zigzag=True` the sequences are in head-tail order, into which the function `zigzag` brings them, and a causal
    mask follows the original positions of tokens. Where activations are recomputed, call backward inside, too.

    >>> with attention_over_sequence("ring"):
    ...     F.scaled_dot_product_attention(q, k, v, is_causal=True)    # q, k, v: [Shard(2)]
    """
    if method is not None and method not in get_args(Method):
        raise InputError(
            f"attention_over_sequence got method={method!r}",
            f"use one of {', '.join(map(repr, get_args(Method)))}, or None",
        )
    before = _mode.get()
    with _mode.changed_to(SequenceMode(method or before.method, before.zigzag if zigzag is None else zigzag)):
        yield
