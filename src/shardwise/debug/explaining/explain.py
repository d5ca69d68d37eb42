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
from typing import Any, overload

from .recorder import Recorder
from .records import Told
from .text import told_as_text


class Explanation(Told):
    """Every communication of a block of code, with its line, module, op, reason, price, alternatives and edit.

    Prints as text; `to_dict()` and `to_json()` hold the same and more.
    """

    result: Any = None
    """What the function returned, if `explain` ran one."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()

    def __enter__(self) -> Explanation:
        recorder = Recorder()
        self.communications, self.mesh_axes = recorder.communications, recorder.mesh_axes
        self._stack.enter_context(recorder.recording())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __str__(self) -> str:
        return told_as_text(self)

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
    """
    explanation = Explanation()
    if function is not None:
        with explanation:
            explanation.result = function(*args, **kwargs)
    return explanation
