"""The text that sums up the reports of all entries."""

from __future__ import annotations

from collections.abc import Sequence

from ..._torch.testing import runs_on_cpu
from ...ops.registry import registry
from ...ops.schema import overloads
from ..probe import Suggestion
from .entry import Report


def unreached(reports: Sequence[Report]) -> tuple[list[str], list[str]]:
    """Return the registered rules that no entry used: those that run on a CPU, and those of other devices."""
    reached = {rule for report in reports for rule in report.rules}
    missing = [key for key in registry if registry[key].rule is not None and key not in reached]
    here = [key for key in missing if _runs_here(key)]
    return here, [key for key in missing if key not in here]


def _runs_here(key: str) -> bool:
    packet, _, _ = key.partition(".")
    return any(runs_on_cpu(op) for op in overloads(packet))


def summary(reports: Sequence[Report], by_rule: bool) -> str:
    """Return the text that sums up all reports."""
    lines = []
    for kind in ("crash", "slow", "wrong", "error"):
        for report in reports:
            lines += [
                f"{kind:6} {report.entry}: {f.op} {f.where}\n       {f.text}" for f in report.failures if f.kind == kind
            ]
    if by_rule:
        bad: dict[str, set[str]] = {}
        for report in reports:
            for rule in report.rules:
                bad.setdefault(rule, set()).update({report.status} - {"ok"})
        lines += ["", "rules, with the failures of entries that use them:"]
        lines += [f"  {rule}: {', '.join(sorted(bad[rule])) or 'ok'}" for rule in sorted(bad)]
        here, elsewhere = unreached(reports)
        lines += ["", f"not reached by any entry: {', '.join(here) or 'none'}"]
        lines += [f"of other devices: {', '.join(elsewhere) or 'none'}"]
        gathered = sorted({op for report in reports for op in report.gathered})
        lines += ["", f"ran on gathered inputs: {', '.join(gathered) or 'none'}"]
        lines += ["", "factors that could perhaps be sharded:", *_hints(reports)]
    cases = sum(report.cases for report in reports)
    bad_entries = [report.entry for report in reports if report.failures]
    lines += ["", f"{len(reports)} entries, {cases} cases, {len(bad_entries)} entries with failures"]
    return "\n".join(lines)


def _hints(reports: Sequence[Report]) -> list[str]:
    found: dict[str, list[Suggestion]] = {}
    for report in reports:
        for hint in report.suggestions:
            found.setdefault(hint.key, []).append(hint)
    firsts = [hints[0] for _, hints in sorted(found.items())]
    return [f"  {hint.key}: {hint.factor} of {hint.rule!r} ({hint.found})" for hint in firsts]
