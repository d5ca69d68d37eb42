"""Run PyTorch's own tests of DTensor under take-over, and compare the outcome with the list of exemptions.

    python -m tests.dropin.pytorch_tests CHECKOUT [FILE ...] [--write] [--theirs] [--results RESULTS.tsv]

CHECKOUT is a checkout of PyTorch, of the installed version; only its folder test/distributed/tensor is read. Failures
that exempt.txt does not list are printed, and so are tests that it lists and that pass. `--write` updates the rows of
these files, and the list of exemptions, in docs/differences.md. `--results` takes the outcome of an earlier run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .exemptions import Reason, exemptions, reason_of
from .page import write_page

HERE = Path(__file__).parent
FOLDER = "test/distributed/tensor"
SECONDS_PER_FILE = 3000


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test."""

    outcome: str
    file: str
    test: str
    words: str

    @property
    def name(self) -> str:
        """The name by which exempt.txt lists it."""
        return f"{self.file}::{self.test}"


def main() -> int:
    """Run the files and print what is unexpected."""
    parser = argparse.ArgumentParser(prog="python -m tests.dropin.pytorch_tests", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", help="relative to test/distributed/tensor; all of them if none is given")
    parser.add_argument("--write", action="store_true", help="update docs/differences.md")
    parser.add_argument("--theirs", action="store_true", help="run PyTorch's own DTensor")
    parser.add_argument("--results", type=Path, help="read these results instead of running; or, with files, add to it")
    options = parser.parse_args()

    folder = options.checkout.resolve() / FOLDER
    results = options.results or Path(tempfile.mkdtemp()) / "results.tsv"
    if options.files or not results.exists():
        for file in options.files or sorted(str(f.relative_to(folder)) for f in folder.rglob("test_*.py")):
            _run(folder, file, results, options.theirs)
    outcomes = _read(results)
    reasons = exemptions()
    if options.write:
        write_page(counts(outcomes, reasons), reasons)
    return _report(outcomes, reasons)


def _run(folder: Path, file: str, results: Path, theirs: bool) -> None:
    """Run one file in a process of its own; a file that cannot be imported is one failure."""
    old = results.read_text().splitlines(keepends=True) if results.exists() else []
    results.write_text("".join(line for line in old if line.split("\t")[1] != file))
    command = [sys.executable, "-W", "ignore", str(HERE / "run_file.py"), str(folder / file), str(results.resolve())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    before = results.stat().st_size
    words = ""
    try:
        done = subprocess.run(
            [*command, *(["--theirs"] if theirs else [])],
            cwd=folder,
            env=environment,
            timeout=SECONDS_PER_FILE,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode or results.stat().st_size == before:
            words = (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        words = f"no answer in {SECONDS_PER_FILE} seconds"
    if words:
        with results.open("a") as log:
            log.write(f"fail\t{file}\tfile\t0\t{words[:400]}\n")


def _read(results: Path) -> list[Outcome]:
    rows = [line.split("\t") for line in results.read_text().splitlines()]
    return [Outcome(outcome, file, test, words) for outcome, file, test, _, words in rows]


def counts(outcomes: list[Outcome], reasons: list[Reason]) -> dict[str, Counter[str]]:
    """For each file: how many tests pass, are skipped, are exempt by each reason, and fail."""
    found: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        kind = outcome.outcome if outcome.outcome != "fail" else reason_of(outcome.name, reasons) or "fail"
        found.setdefault(outcome.file, Counter())[kind] += 1
    return found


def _report(outcomes: list[Outcome], reasons: list[Reason]) -> int:
    exempt = {name for reason in reasons for name in reason.tests}
    unexpected = [o for o in outcomes if o.outcome == "fail" and reason_of(o.name, reasons) is None]
    for outcome in unexpected:
        print(f"fails: {outcome.name}: {outcome.words}")
    for outcome in outcomes:
        if outcome.outcome == "ok" and outcome.name in exempt:
            print(f"passes, but is listed in exempt.txt: {outcome.name}")
    total = sum(counts(outcomes, reasons).values(), Counter())
    public = total["ok"] + total["fail"]
    print(f"{total['ok']} of {public} tests of public behaviour pass ({total['ok'] / max(public, 1):.1%}),")
    print(f"{total['skip']} are skipped here, {sum(total.values()) - public - total['skip']} are exempt")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
