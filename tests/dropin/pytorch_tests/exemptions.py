"""The tests of PyTorch that fail under take-over for a reason, read from exempt.txt.

[key] The reason, as a sentence of docs/differences.md.
test_api.py::DTensorAPITest.test_name: what is particular to this test
test_api.py::DTensorAPITest.*: what is particular to all tests of a class
"""

from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("exempt.txt")


@dataclass(frozen=True)
class Reason:
    """Why some tests are exempt, and for each of them (`file::Class.test`) what is particular to it."""

    key: str
    text: str
    tests: dict[str, str] = field(default_factory=dict)


def reason_of(name: str, reasons: list[Reason]) -> str | None:
    """The key of the reason for which a test (`file::Class.test`) is exempt."""
    file, _, test = name.partition("::")
    patterns = {name, f"{file}::{test.rpartition('.')[0]}.*", f"{file}::*"}
    return next((reason.key for reason in reasons if not patterns.isdisjoint(reason.tests)), None)


def exemptions() -> list[Reason]:
    """The reasons in the order of the file. A test is listed once."""
    reasons: list[Reason] = []
    listed: set[str] = set()
    for number, line in enumerate(FILE.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            key, _, text = line[1:].partition("] ")
            reasons.append(Reason(key, text))
            continue
        name, _, note = f"{line} ".partition(": ")
        if "::" not in name or not reasons or name in listed:
            raise ValueError(
                f"exempt.txt, line {number}: write `file::Class.test: note` once, below a [key] of a reason"
            )
        listed.add(name)
        reasons[-1].tests[name] = note.strip()
    return reasons
