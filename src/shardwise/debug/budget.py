"""`budget`: an error, with an explanation, if a block of code communicates more than it may.

>>> with budget(all_gather=2, bytes="3 MiB", over="tp"):
...     model(x).sum().backward()
shardwise.errors.BudgetError: 3 all_gather over tp where 2 are allowed: ...
"""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.plan import bytes_text
from ..errors import BudgetError, InputError
from ..ops.collectives import collective_names
from ..sharding.runtime import active_runtime
from ..tensor.gradient_buckets import bytes_of
from .explaining.explain import Explanation
from .explaining.records import Communication, RecordedExplanation
from .explaining.text import explanation_text


class budget:
    """Limits the communication of the block; raises a `BudgetError` at its end if there was more.

    A limit is a number of collectives by name, as `all_gather=2`, `all_reduce=0`; names are those of
    `CommDebugMode.get_comm_counts()`, with or without their ending `_into_tensor` or `_tensor`. `total` limits the
    number of all collectives, `bytes` what a rank receives in them. With `over`, only collectives over this mesh axis
    count, or over one of these axes; a collective over several axes at once counts for each of them. Without any limit,
    nothing may be communicated.

    >>> with budget(total=0, over="dp"):      # nothing over dp; anything over other axes
    ...     loss = model(x)
    """

    def __init__(
        self,
        *,
        total: int | None = None,
        bytes: int | str | None = None,
        over: str | Sequence[str] | None = None,
        **counts: int,
    ) -> None:
        known = collective_names()
        for name in counts:
            if name not in known:
                listed = ", ".join(sorted(set(known.values())))
                raise InputError(f"budget got {name}=, which is no collective", f"use one of {listed}")
        self._counts = counts
        self._total = 0 if total is None and bytes is None and not counts else total
        self._bytes = None if bytes is None else bytes_of(bytes, "budget")
        self._over = (over,) if isinstance(over, str) else None if over is None else tuple(over)
        self.explanation = Explanation()
        """What was communicated, once the block has ended."""

    def __enter__(self) -> budget:
        self.explanation.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.explanation.__exit__(kind, error, trace)
        if error is not None:
            return
        self._check_axes()
        counted = [each for each in self.explanation.communications if self._counts_for(each)]
        problems = self._problems(counted)
        if problems:
            raise BudgetError(
                "; ".join(problems), explanation_text(RecordedExplanation(counted, self.explanation.mesh_axes))
            )

    def _check_axes(self) -> None:
        axes = {name for mesh_info in active_runtime().meshes.values() for name in mesh_info.names}
        missing = [axis for axis in self._over or () if axis not in axes]
        if missing and axes:
            raise InputError(f"budget got over={missing[0]!r}, which is no mesh axis", f"use {', '.join(sorted(axes))}")

    def _counts_for(self, each: Communication) -> bool:
        return self._over is None or any(axis in self._over for axis in each.over)

    def _problems(self, counted: Sequence[Communication]) -> list[str]:
        over = "" if self._over is None else f" over {' or '.join(self._over)}"
        known = collective_names()
        problems = []
        for name, allowed in self._counts.items():
            found = sum(known[each.collective] == known[name] for each in counted)
            if found > allowed:
                problems.append(f"{found} {name}{over} where {allowed} {_are(allowed)} allowed")
        if self._total is not None and len(counted) > self._total:
            problems.append(f"{len(counted)} collectives{over} where {self._total} {_are(self._total)} allowed")
        received = sum(each.bytes for each in counted)
        if self._bytes is not None and received > self._bytes:
            problems.append(f"{bytes_text(received)} received{over} where {bytes_text(self._bytes)} are allowed")
        return problems


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
