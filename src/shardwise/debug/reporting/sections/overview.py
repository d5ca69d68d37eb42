"""The first section: figures, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...drawing.markup import Markup, join, tag
from ..findings import Finding


def overview(figures: Mapping[str, str], findings: Sequence[Finding]) -> Markup:
    """Return the figures of the step, and the list of warnings."""
    cards = [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures.items()]
    return join([tag("dl", *cards, class_="figures"), _findings(findings)])


def _findings(findings: Sequence[Finding]) -> Markup:
    if not findings:
        return tag("p", "No warnings.", class_="fine")
    items = []
    for finding in findings:
        head = [tag("span", finding.severity, class_="badge"), tag("b", finding.title)]
        fix = [tag("p", tag("b", "Fix: "), finding.fix)] if finding.fix else []
        items.append(tag("li", *head, tag("p", finding.text), *fix, class_=finding.severity))
    return tag("ul", *items, class_="findings", aria_label="Warnings")
