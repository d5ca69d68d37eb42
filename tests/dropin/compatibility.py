"""Programs for torch.distributed.tensor, run unmodified on PyTorch's DTensor and on shardwise: docs/compatibility.md.

    python -m tests.dropin.compatibility               all programs whose libraries are installed
    python -m tests.dropin.compatibility llama.py      one of them; its rows are replaced, the others are kept

A program is a file of tests/dropin/programs. It runs on four gloo processes, and compares itself with one device in
several checks. If one fails, the program is started again without it, so that each has a result.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

PROGRAMS = Path(__file__).parent / "programs"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
FILES = {
    "fsdp.py": ["torch"],
    "others.py": ["torch"],
    "pipelines.py": ["torch"],
    "state_dicts.py": ["torch"],
    "llama.py": ["torch"],
    "context.py": ["torch"],
    "hub.py": ["transformers"],
    "trainers.py": ["transformers", "accelerate", "peft"],
    "optimizers.py": ["torch", "pytorch_optimizer"],
    "heavyball_optimizers.py": ["heavyball"],
}
"""The programs, each with the libraries that it runs."""
EQUAL = "equal to one device"
_LONGEST = 160
_SECONDS = 300
_SIDES = {"PyTorch": [], "shardwise": ["-m", "shardwise.run"]}
_HEAD = f"""# Compatibility

Programs that import `torch.distributed.tensor`, run unmodified: once as they are, on PyTorch's own DTensor, and once
with `torchrun -m shardwise.run`, which puts shardwise in its place. Each runs on four gloo processes on CPUs, and
compares values, losses, gradient norms and parameters with the same program on one device. "{EQUAL}" means that
all of them agree. Anything else is the error that the check ended with.

`make compatibility` runs the programs of `tests/dropin/programs` and writes this page.

| program | library | what was run | shardwise | PyTorch's DTensor |
|---|---|---|---|---|
"""


class Result(NamedTuple):
    """What became of one check."""

    check: str
    text: str


def results(file: str, side: str) -> Iterator[Result]:
    """Run the checks of a program, and return what became of each, as it is known."""
    done: list[str] = []
    while True:
        output, ended = _output(file, side, done)
        passed = re.findall(r"^passed: (.*)$", output, re.MULTILINE)
        failed = re.search(r"^failed: (.*) => (.*)$", output, re.MULTILINE)
        yield from (Result(check, EQUAL) for check in passed)
        done += passed
        if ended:
            return
        if failed is None or failed[1] in done:
            yield Result("all others" if done else "all", _last_line(output))
            return
        yield Result(failed[1], failed[2])
        done.append(failed[1])


def _output(file: str, side: str, done: list[str]) -> tuple[str, bool]:
    """Return what a program printed, and whether it came to its end, without the checks that are done."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    # The programs run on CPUs; transformers would take the GPU whose number is that of the rank.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        command += [*_SIDES[side], str(PROGRAMS / file), folder, *done]
        try:
            found = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                env=environment,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            printed = error.stdout or b""
            return f"{printed.decode() if isinstance(printed, bytes) else printed}\nno end in {_SECONDS} s", False
    return found.stdout, found.returncode == 0


def _last_line(output: str) -> str:
    errors = re.findall(r"^(?:\[rank\d\]: )?(\w*(?:Error|Exception): .*|no end in .*)$", output, re.MULTILINE)
    return errors[0] if errors else output.strip().rpartition("\n")[2]


def versions(file: str) -> str | None:
    """Return the libraries of a program with their versions, or None if one is not installed."""
    try:
        return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in FILES[file])
    except PackageNotFoundError:
        return None


def rows(file: str, sides: dict[str, dict[str, str]]) -> list[str]:
    """Return the rows of a program in the table, one for each check."""
    names = dict.fromkeys(check for side in ("shardwise", "PyTorch") for check in sides[side])
    head = f"| {file} | {versions(file)}"
    return [
        f"{head} | {name} | {_cell(sides['shardwise'], name)} | {_cell(sides['PyTorch'], name)} |" for name in names
    ]


def _cell(found: dict[str, str], check: str) -> str:
    text = found.get(check) or found.get("all others") or found.get("all") or "did not run"
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return short if text == EQUAL else f"`{short.replace('|', '/').replace('`', '')}`"


def write(file: str, found: list[str]) -> None:
    """Put the rows of a program into the page, in the place of those that it has."""
    old = PAGE.read_text().split("\n") if PAGE.exists() else []
    kept = {name: [line for line in old if line.startswith(f"| {name} |")] for name in FILES}
    lines = [line for rows_of in (kept | {file: found}).values() for line in rows_of]
    PAGE.write_text(_HEAD + "\n".join(lines) + "\n")


def main() -> int:
    """Run the command line; returns the exit code, 1 if a check failed with shardwise that passes with PyTorch's."""
    parser = argparse.ArgumentParser(prog="python -m tests.dropin.compatibility")
    parser.add_argument("programs", nargs="*", choices=[*FILES, []], help="files; all, if none is named")
    chosen = parser.parse_args().programs
    console = Console(highlight=False, soft_wrap=True)
    files = [file for file in chosen or FILES if versions(file)]
    for file in sorted({*(chosen or FILES)} - {*files}):
        console.print(f"{file} is left out: pip install {' '.join(FILES[file])}")
    worse = 0
    with Progress(console=console) as progress:
        task = progress.add_task("programs", total=2 * len(files))
        for file in files:
            found: dict[str, dict[str, str]] = {}
            for side in _SIDES:
                progress.update(task, description=f"{file} on {side}")
                found[side] = dict(results(file, side))
                progress.advance(task)
            write(file, rows(file, found))
            worse += sum(found["PyTorch"].get(check) == EQUAL != text for check, text in found["shardwise"].items())
            console.print("\n".join(rows(file, found)), markup=False)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
