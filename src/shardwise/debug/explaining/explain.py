"""`explain`: why a block of code, or a function, communicates.

>>> with explain() as e:
...     loss = model(x).sum()
...     loss.backward()
>>> print(e)
>>> e.communications[0].reason
'mm needs k unsharded on tp; moving w costs 2.1 MiB, moving x 64 KiB'
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import overload

import torch.distributed as dist

from .recorder import Recorder
from .records import RecordedExplanation
from .text import explanation_text
from .timeline import Timeline
from .trace_file import trace_events, write_events

FLOPS_PER_SECOND = 1e11
BYTES_PER_SECOND = 1e10
"""The speeds of a rank in a modelled trace: the orders of magnitude of one CPU."""


class Explanation(RecordedExplanation):
    """Every communication of a block of code, with its line, module, op, reason, price, alternatives and edit.

    It prints as text; `to_dict()` and `to_json()` return all fields.

    >>> with explain() as explanation:
    ...     y = x.redistribute(placements=P())
    >>> explanation.total.count, explanation.communications[0].reason
    (1, 'redistribute was called: f32[8@dp, 4@tp] -> f32[8, 4]')
    """

    result: object = None
    """What the function returned, if `explain` ran one."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._timeline = Timeline()

    def __enter__(self) -> Explanation:
        recorder = Recorder()
        self.communications, self.mesh_axes = recorder.communications, recorder.mesh_axes
        self._timeline = recorder.timeline
        self._stack.enter_context(recorder.recording())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def trace(
        self,
        path: str | Path,
        *,
        flops_per_second: float = FLOPS_PER_SECOND,
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> Path:
        """Write a trace for chrome://tracing and ui.perfetto.dev; returns the path of the file.

        It has a process for each rank, with a track for ops and one for each set of axes. For simulated ranks times are
        modelled: those of collectives by the cost model, those of ops by these speeds of a rank. On a process they are
        measured, on the host, and the number of the rank is put before the suffix of the path.
        """
        timeline, target = self._timeline, Path(path)
        if not timeline.simulated and dist.is_initialized() and dist.get_world_size() > 1:
            target = target.with_suffix(f".rank{dist.get_rank()}{target.suffix}")
        return write_events(target, trace_events(timeline.spans(flops_per_second, bytes_per_second)))

    def __str__(self) -> str:
        return explanation_text(self)

    def __repr__(self) -> str:
        total = self.total
        return f"<Explanation of {total.count} collectives>"


@overload
def explain() -> Explanation: ...
@overload
def explain(function: Callable[..., object], *args: object, **kwargs: object) -> Explanation: ...
def explain(function: Callable[..., object] | None = None, *args: object, **kwargs: object) -> Explanation:
    """Explain the communication inside a `with` block; or run `function(*args, **kwargs)` and explain that.

    The function's result is `explain(...).result`.

    >>> with explain() as explanation:
    ...     y = x.redistribute(placements=P())
    >>> print(explanation)                                  # each collective with its line, reason and price
    """
    explanation = Explanation()
    if function is not None:
        with explanation:
            explanation.result = function(*args, **kwargs)
    return explanation
