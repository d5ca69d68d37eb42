"""Losses of elements and of rows: sums of what each rank holds.

A mean divides by the whole count, not by what a rank holds: their local parts are in `kernels/loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..notation.build import pointwise
from .call import Call
from .tables import register_table

NONE, MEAN, SUM = 0, 1, 2
"""The values of a `reduction` argument."""

ELEMENTWISE = {"mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3}
"""Losses of each element, and their operands; the last one of three is a weight that broadcasts."""


def elementwise(operands: int) -> Callable[[Call], str]:
    """A loss of each element, or the sum of all."""

    def rule(call: Call) -> str:
        text = pointwise(operands)
        return text if call.arg("reduction") == NONE else text.partition("->")[0] + "->"

    return rule


def elementwise_backward(operands: int) -> Callable[[Call], str]:
    """The gradient of such a loss, from that of each element or of the sum."""

    def rule(call: Call) -> str:
        gradient = "b?.." if call.arg("reduction") == NONE else ""
        return f"{gradient}{', b?..' * operands} -> b.. ; linear 0"

    return rule


def _row(call: Call, position: int) -> tuple[str, str]:
    """Rows of scores and what there is one of for each row; a single row has no dim for it, or one of size 1."""
    return ("n [c]", "n") if call.ndim(position) == 2 else ("_..", "_..")


def multi_margin(call: Call) -> str:
    """A loss for each row of scores, whose classes are compared."""
    scores, row = _row(call, 0)
    return f"{scores}, {row}, [c] -> {row if call.arg('reduction') == NONE else ''}"


def multi_margin_backward(call: Call) -> str:
    """Its gradient."""
    scores, row = _row(call, 1)
    return f"{row if call.arg('reduction') == NONE else ''}, {scores}, {row}, [c] -> {scores} ; linear 0"


def multilabel_margin(call: Call) -> str:
    """The same with several targets for each row, which are also returned as a mask."""
    scores, row = _row(call, 0)
    return f"{scores}, {scores} -> {row if call.arg('reduction') == NONE else ''}, {scores}"


def multilabel_margin_backward(call: Call) -> str:
    """Its gradient."""
    scores, row = _row(call, 1)
    gradient = row if call.arg("reduction") == NONE else ""
    return f"{gradient}, {scores}, {scores}, {scores} -> {scores} ; linear 0"


register_table(
    {
        **{f"aten::{name}": elementwise(operands) for name, operands in ELEMENTWISE.items()},
        **{f"aten::{name}_backward": elementwise_backward(operands) for name, operands in ELEMENTWISE.items()},
        "aten::binary_cross_entropy_with_logits": elementwise(4),
        "aten::multi_margin_loss": multi_margin,
        "aten::multi_margin_loss_backward": multi_margin_backward,
        "aten::multilabel_margin_loss_forward": multilabel_margin,
        "aten::multilabel_margin_loss_backward": multilabel_margin_backward,
    }
)
