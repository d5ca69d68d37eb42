"""Random programs that compare distributed tensors with plain ones: `python -m shardwise.testing.fuzz`.

A program is a list of statements as a user might write them: leaves with any placements, ops, views, writes,
redistributions, backward passes. It runs on plain tensors and on distributed ones; values, dtypes, shapes, strides,
gradients and errors must be the same. A program that fails is shrunk and printed as a script that calls `replay`.
"""

from __future__ import annotations

from .generate import generate
from .program import Program
from .trial import replay, trial

__all__ = ["Program", "generate", "replay", "trial"]
