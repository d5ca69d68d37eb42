"""The counts of a run, and docs/coverage.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...ops.served import KINDS
from .entry import Outcome

DOCUMENT = Path("docs/coverage.md")
REFERENCE = Path("docs/coverage_reference.txt")
ERRORS = ("error", "crash", "slow")
SHOWN = 6  # placements of a row

_HEAD = """\
# Coverage

This page compares every entry of PyTorch's operator database on distributed tensors with the same call on one device.
`make coverage` writes it. Each entry runs with at least {samples} samples, and each sample with {placements} random
choices of placements for all its tensors, on a 1-D mesh of 4 ranks and on a 2x2 mesh. Some inputs are Partial, and many
are sharded unevenly. Results, gradients and arguments that are written in place are compared. For random functions the
shapes, dtypes and distributions are compared, and replicas must be equal.

`make reference` measures torch.distributed.tensor: the same script, samples and comparisons on four gloo processes, and
at least two of the choices of placements. There, a hang counts as an error.

"""

_LEGEND = """
Not applicable: functions without tensor arguments, functions of sparse tensors, and functions that run only on other
devices.

- *served*: how the ops are executed: by a hand-written `rule`, by a rule of the `generated` table, by `decomposition`
  into ops that have rules, or `gathered`, which means on gathered inputs. A function and its gradient may call several
  ops; the table shows the last of these four that occurs among them.
- *rule*: the rule of the op of the same name, for one sample. For a function that calls other ops: the names of these.
- *without communication*: placements of the tensors of one sample on a 1-D mesh for which the forward pass does not
  communicate, apart from all Replicate. S0 is Shard(0), R is Replicate, P is Partial(sum).
- *status*: the outcome for shardwise. `random` marks functions with random results.
- *PyTorch*: the outcome for torch.distributed.tensor.

"""


def counts(statuses: Sequence[str]) -> dict[str, int]:
    """Return how many entries are all correct, silently wrong, with errors, and not applicable."""
    found = Counter(statuses)
    return {
        "all correct": found["ok"],
        "silently wrong": found["wrong"],
        "with errors": sum(found[kind] for kind in ERRORS),
        "not applicable": found["none"],
    }


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the counts of a run as a few lines of text."""
    placed = [outcome for outcome in outcomes if outcome.status != "none"]
    kinds = Counter(outcome.kind for outcome in placed)
    lines = [f"{count:5} {what}" for what, count in counts([outcome.status for outcome in outcomes]).items()]
    lines += [f"served by: {', '.join(f'{kind} {kinds[kind]}' for kind in KINDS)}"]
    if placed:
        lines += [f"not on gathered inputs: {100 * (1 - kinds['gathered'] / len(placed)):.1f} %"]
    lines += [f"{len(outcomes)} entries, {sum(outcome.cases for outcome in outcomes)} cases"]
    return "\n".join(lines)


def document(outcomes: Sequence[Outcome], reference: Mapping[str, str], samples: int, placements: int) -> str:
    """Return the text of docs/coverage.md."""
    ours = counts([outcome.status for outcome in outcomes])
    theirs = counts(list(reference.values()))
    text = _HEAD.format(samples=samples, placements=placements)
    text += "| entries | shardwise | torch.distributed.tensor |\n|---|---|---|\n"
    for what, count in ours.items():
        text += f"| {what} | {count} | {theirs[what] if reference else ''} |\n"
    placed = [outcome for outcome in outcomes if outcome.status != "none"]
    kinds = Counter(outcome.kind for outcome in placed)
    text += "\n| served by | entries | |\n|---|---|---|\n"
    for kind in KINDS:
        text += f"| {kind} | {kinds[kind]} | {100 * kinds[kind] / max(1, len(placed)):.1f} % |\n"
    text += _LEGEND + "| op | served | rule | without communication | status | PyTorch |\n|---|---|---|---|---|---|\n"
    for outcome in sorted(placed, key=lambda outcome: outcome.name.lower()):
        text += _row(outcome, reference.get(outcome.name, ""))
    return text


def _row(outcome: Outcome, reference: str) -> str:
    local = [" ".join(outcome.local[i : i + 1]) for i in range(min(SHOWN, len(outcome.local)))]
    more = f", and {len(outcome.local) - SHOWN} more" if len(outcome.local) > SHOWN else ""
    rule = outcome.rule.replace("|", "\\|")
    status = outcome.status + (", random" if outcome.random else "")
    name = outcome.name.replace("_", "\\_") if outcome.name.startswith("_") else outcome.name
    return f"| {name} | {outcome.kind} | {rule} | {', '.join(local)}{more} | {status} | {_theirs(reference)} |\n"


def _theirs(status: str) -> str:
    return "error" if status in ERRORS else status


def read_reference() -> dict[str, str]:
    """Return the outcomes for torch.distributed.tensor, by entry."""
    if not REFERENCE.exists():
        return {}
    lines = REFERENCE.read_text().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))


def write_reference(outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes for torch.distributed.tensor to docs/coverage_reference.txt."""
    head = "# torch.distributed.tensor on the samples of docs/coverage.md; made by `make reference`\n"
    rows = sorted(f"{outcome.name} {_theirs(outcome.status)}\n" for outcome in outcomes)
    REFERENCE.write_text(head + "".join(rows))
