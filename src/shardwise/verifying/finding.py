"""Finding where a run on ranks first departs from the reference.

Whether there is a difference is decided by tensors that must agree. Activations show where it begins. They may differ
for good reasons, so one of them counts only if nothing computed from it is right again.
"""

from __future__ import annotations

from dataclasses import dataclass

from .comparing import MUST_AGREE, Comparison, Outcome
from .recording import Key, Kind

_FORWARD = ("input", "output")
_PHASES: dict[Kind, int] = {
    "initial": 0, "input": 1, "output": 1, "loss": 2, "output gradient": 3, "gradient": 4, "value": 5, "norm": 5,
    "clipped gradient": 6, "parameter": 7, "buffer": 8,
}  # fmt: skip
"""The order of the kinds in a step: a program may return its loss after the optimizer has run."""


@dataclass(frozen=True)
class Found:
    """A tensor that differs."""

    key: Key
    outcome: Outcome
    before: Key | None = None
    """The last tensor before it that is the same in both runs."""


def find(comparison: Comparison) -> list[Found]:
    """Return the tensors that differ, in the order in which they are computed; none if all that must agree does."""
    keys = sorted(comparison.reference.seen, key=lambda key: (key.step, _PHASES[key.kind]))
    must = [key for key in keys if key.kind in MUST_AGREE and comparison.outcome(key).status == "differs"]
    found = [Found(key, comparison.outcome(key)) for key in must]
    if must and must[0].kind == "initial":
        return found
    if must:
        step = must[0].step
    elif comparison.found.error is not None:  # a difference in that step may have caused it
        step = max(key.step for key in comparison.found.seen)
    else:
        return []
    of_step = [key for key in keys if key.step == step]
    before = of_step[: of_step.index(must[0])] if must else of_step
    first = None
    if not must or must[0].kind == "loss":
        first = _first_forward(comparison, [key for key in before if key.kind in _FORWARD], surely=bool(must))
    elif must[0].kind == "gradient":
        first = _first_gradient(comparison, before, must)
    if first is None:
        return found
    earlier = [key for key in of_step[: of_step.index(first)] if comparison.outcome(key).status == "same"]
    return [Found(first, comparison.outcome(first), earlier[-1] if earlier else None), *found]


def _first_forward(comparison: Comparison, forward: list[Key], *, surely: bool) -> Key | None:
    """Return the first activation of the forward pass that is wrong, or None if the forward pass is right.

    A tensor that is merely suspect counts if it is followed by one that differs, `surely` by the loss.
    """
    wrong = [key for key in forward if comparison.outcome(key).status == "differs"]
    wrong = [key for key in wrong if not _healed(comparison, key, forward)]
    if not wrong and not surely:
        return None
    at = forward.index(wrong[0]) if wrong else len(forward)
    first = wrong[0] if wrong else None
    # An operand of a sum is fine as long as only the sum is computed from it.
    for key in reversed(forward[:at]):
        status = comparison.outcome(key).status
        if status not in ("suspect", "unknown"):
            break
        first = key if status == "suspect" else first
    return first


def _healed(comparison: Comparison, key: Key, forward: list[Key]) -> bool:
    """Return whether a module around the one of this tensor returns the right output."""
    around = [
        other
        for other in forward[forward.index(key) + 1 :]
        if other.kind == "output" and key.path != other.path and _inside(key.path, other.path)
    ]
    return any(comparison.outcome(other).status == "same" for other in around)


def _first_gradient(comparison: Comparison, before: list[Key], must: list[Key]) -> Key | None:
    """Return the first activation with a wrong gradient whose module has only parameters with wrong gradients."""
    wrong = {key.path for key in must if key.kind == "gradient" and key.step == must[0].step}
    known = {key.path for key in comparison.reference.seen if key.kind == "gradient" and key.step == must[0].step}
    for key in before:
        if key.kind == "output gradient" and comparison.outcome(key).status == "differs":
            behind = {path for path in known if _inside(path, key.path)}
            if behind and behind <= wrong:
                return key
    return None


def _inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")
