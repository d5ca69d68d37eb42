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

Every entry of PyTorch's operator database on distributed tensors, against one device. Made by `make coverage`. Each is
tried with {samples} samples or more, each with {placements} random placements of all its tensors, on a line of 4 ranks
and a mesh of 2x2. Some inputs are Partial, many are cut unevenly. Results, gradients and arguments that are written are
compared. Of random functions shapes, dtypes and distributions are compared, and that replicas agree.

The column for torch.distributed.tensor is made by `make reference`: the same script, samples and comparisons on four
gloo processes, with two or more of the placements. There a hang is an error.

"""

_LEGEND = """
- *served*: by a `rule`; by a rule of the `generated` table; by `decomposition` into ops that have rules; or `gathered`,
  on gathered inputs. Of the ops that a function and its gradient call, the one that is served worst counts.
- *rule*: that of the op of the same name, for one sample; for a function that is made of other ops, those ops.
- *without communication*: placements of the tensors of one sample on a line of ranks that need none, forward, beside
  all Replicate. S0 is Shard(0), R Replicate, P Partial(sum).
- *PyTorch*: the same measured for torch.distributed.tensor.

"""


def counts(statuses: Sequence[str]) -> dict[str, int]:
    """How many are all correct, silently wrong, with errors, and not applicable."""
    found = Counter(statuses)
    return {
        "all correct": found["ok"],
        "silently wrong": found["wrong"],
        "with errors": sum(found[kind] for kind in ERRORS),
        "nothing to place": found["none"],
    }


def summary(outcomes: Sequence[Outcome]) -> str:
    """What a run showed, in a few lines."""
    placed = [outcome for outcome in outcomes if outcome.status != "none"]
    kinds = Counter(outcome.kind for outcome in placed)
    lines = [f"{count:5} {what}" for what, count in counts([outcome.status for outcome in outcomes]).items()]
    lines += [f"served by: {', '.join(f'{kind} {kinds[kind]}' for kind in KINDS)}"]
    if placed:
        lines += [f"not on gathered inputs: {100 * (1 - kinds['gathered'] / len(placed)):.1f} %"]
    lines += [f"{len(outcomes)} entries, {sum(outcome.cases for outcome in outcomes)} cases"]
    return "\n".join(lines)


def document(outcomes: Sequence[Outcome], reference: Mapping[str, str], samples: int, placements: int) -> str:
    """The text of docs/coverage.md."""
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
    text += "\nNothing to place: functions that take no tensor, or sparse ones, or that run on other devices alone.\n"
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
    """The outcomes for torch.distributed.tensor, by entry."""
    if not REFERENCE.exists():
        return {}
    lines = REFERENCE.read_text().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))


def write_reference(outcomes: Sequence[Outcome]) -> None:
    """Keep the outcomes for torch.distributed.tensor."""
    head = "# torch.distributed.tensor on the samples of docs/coverage.md; made by `make reference`\n"
    rows = sorted(f"{outcome.name} {_theirs(outcome.status)}\n" for outcome in outcomes)
    REFERENCE.write_text(head + "".join(rows))
