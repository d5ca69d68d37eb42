"""The verifier: every rule, with every placement it allows, gives the one-device answer.

    python -m shardwise.testing.verify [--quick] [--only NAME] [--limit N] [--seed N]

For each entry of PyTorch's operator database and of our own samples:

- the function is checked with sampled placements of its arguments, forward and backward;
- each op that it calls is called again with the placements that its rule allows: every factor cut, every Partial
  passed on, on lines of 2, 3 and 4 ranks and a mesh of 2x2, where shards are uneven and some are empty;
- whole factors of its rule are probed: could they be cut? These are hints, no failures.

Entries run in child processes, since some ops crash on odd inputs; a crash marks the entry. What no entry reaches
is listed in the end. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from ..comm.groups import adopt
from ..dispatch.fallback import GatherWarning
from ..notation.schema import overloads
from ..ops.registry import registry, rule_for
from ..ops.served import served_by
from ..tensor.dtensor import DTensor
from ..world import simulate
from .calls import Failure, Recorded, call_key, recorded, try_call
from .checker import MESHES, check
from .probe import Suggestion, probe
from .samples import Sample, names, samples

QUICK_ENTRIES = 24
QUICK_MESHES: tuple[tuple[int, ...], ...] = ((3,), (2, 2))
CALLS_OF_AN_OP = 10  # with different shapes, in one process


class Effort(NamedTuple):
    """How much is tried: samples of an entry, placements of a sample on a mesh, seconds for an entry."""

    samples: int = 3
    limit: int = 4
    meshes: tuple[tuple[int, ...], ...] = MESHES
    seconds: float = 10.0
    probing: bool = True


QUICK = Effort(samples=1, limit=2, meshes=QUICK_MESHES, seconds=2.0, probing=False)


@dataclass
class Report:
    """What an entry showed: cases compared, rules exercised, ops that ran whole, and what went wrong."""

    entry: str
    cases: int = 0
    rules: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)

    @property
    def status(self) -> str:
        """`ok`, or the worst failure: `crash`, `wrong`, `error`."""
        kinds = {failure.kind for failure in self.failures}
        return next((kind for kind in ("crash", "slow", "wrong", "error") if kind in kinds), "ok")


# ---- one entry ------------------------------------------------------------------------------------------------------

_tried: dict[Any, set[Any]] = {}


def verify(name: str, effort: Effort = QUICK, seed: int = 0) -> Report:
    """Check one entry by name, in this process."""
    return verify_samples(name, samples(name, effort.samples, seed), effort, seed)


def verify_samples(name: str, given: Sequence[Sample], effort: Effort = QUICK, seed: int = 0) -> Report:
    """Check samples of one's own."""
    report = Report(name)
    deadline = time.monotonic() + effort.seconds
    for sample in given:
        calls = recorded(sample.fn, sample.args, sample.kwargs, sample.grad)
        if calls is None:
            break  # it draws random numbers, which are others than PyTorch's
        _check_function(sample, effort, seed, report)
        for call in calls:
            if time.monotonic() < deadline and _is_new(call):
                _check_call(call, effort, seed, report)
        if time.monotonic() > deadline:
            break
    return report


def _check_function(sample: Sample, effort: Effort, seed: int, report: Report) -> None:
    coarse = report.entry in ("half", "bfloat16")
    with DTensor._op_dispatcher.recording() as plans, warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        try:
            done = check(
                _called(sample.fn),
                sample.args,
                sample.kwargs,
                meshes=effort.meshes,
                limit=effort.limit,
                grad=sample.grad,
                seed=seed,
                partial=("sum", "max"),
                rtol=5e-2 if coarse else 1e-4,
                atol=5e-2 if coarse else 1e-5,
            )
            report.cases += done.cases
        except AssertionError as error:
            report.failures.append(_failure("wrong", report.entry, error))
        except Exception as error:
            report.failures.append(_failure("error", report.entry, error))
    for op, plan, _ in plans:
        if plan is not None:
            report.rules.append(op.key)
        elif served_by(op.func, planned=False) == "gathered":
            report.whole.append(str(op.func))
    report.rules, report.whole = sorted(set(report.rules)), sorted(set(report.whole))


def _called(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of its arguments in two values, so that none can be taken for an option of the checker."""

    def call(args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", str(fn))
    return call


def _failure(kind: str, name: str, error: Exception) -> Failure:
    notes = " ".join(getattr(error, "__notes__", ()))
    return Failure(kind, name, notes, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _is_new(call: Recorded) -> bool:
    """Whether a call is worth trying: others of the same op may have been tried often enough."""
    seen = _tried.setdefault(call.func, set())
    key = call_key(*call)
    if key in seen or len(seen) >= CALLS_OF_AN_OP:
        return False
    seen.add(key)
    return True


def _check_call(call: Recorded, effort: Effort, seed: int, report: Report) -> None:
    for mesh in effort.meshes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)
            tried = try_call(call, mesh, limit=4 * effort.limit, seed=seed)
        report.cases += tried.cases
        report.failures += tried.failures[:3]
        rule = rule_for(call.func)
        if tried.cases and rule is not None and rule.key not in report.rules:
            report.rules.append(rule.key)


def probe_entry(name: str, effort: Effort, seed: int) -> list[Suggestion]:
    """Hints for the rules of the ops that an entry calls."""
    found: list[Suggestion] = []
    with simulate(2):
        mesh_info = adopt(init_device_mesh("cpu", (2,)))
        for sample in samples(name, effort.samples, seed):
            for call in recorded(sample.fn, sample.args, sample.kwargs, sample.grad) or ():
                found += probe(call, mesh_info)
    return list(dict.fromkeys(found))


# ---- child processes ------------------------------------------------------------------------------------------------


def _work(effort: Effort, seed: int) -> None:
    """A child: entry names come in, lines of JSON go out."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what ops print is no answer
    torch.set_num_threads(1)
    for line in sys.stdin:
        name = line.strip()
        try:
            report = verify(name, effort, seed)
        except Exception as error:
            report = Report(name, failures=[_failure("error", name, error)])
        out.write(json.dumps(asdict(report)) + "\n")
        hints: list[Suggestion] = []
        if effort.probing:
            out.flush()
            try:
                hints = probe_entry(name, effort, seed)
            except Exception:
                hints = []
        out.write(json.dumps(hints) + "\n")


class _Child:
    """A child process that checks one entry after the other, started again when it dies."""

    def __init__(self, effort: Effort, seed: int) -> None:
        self.effort, self.seed = effort, seed
        self.process: subprocess.Popen[bytes] | None = None
        self.said = b""

    def ask(self, name: str) -> Report:
        """The report of an entry; a crash or a hang is a failure of it."""
        if self.process is None:
            settings = json.dumps([*self.effort, self.seed])
            command = [sys.executable, "-m", "shardwise.testing.verify", "--child", settings]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdin is not None, "it was opened with a pipe"
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        line = self._line(self.effort.seconds * 4 + 60)
        if not line:
            kind = "slow" if self.process.poll() is None else "crash"
            self.close()
            return Report(name, failures=[Failure(kind, name, "", "the process gave no answer")])
        values = json.loads(line)
        failures = [Failure(*failure) for failure in values.pop("failures")]
        report = Report(**{**values, "failures": failures})
        hints = self._line(60)
        if not hints:
            self.close()  # it crashed on a cut input, which is no failure
        report.suggestions = [Suggestion(*hint) for hint in json.loads(hints or "[]")]
        return report

    def _line(self, patience: float) -> str:
        """The next line of the child; an empty text if it has died or takes too long."""
        assert self.process is not None, "it was started by ask"
        assert self.process.stdout is not None, "it was opened with a pipe"
        deadline = time.monotonic() + patience
        while b"\n" not in self.said:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not more:
                return ""
            self.said += more
        line, _, self.said = self.said.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            with suppress(BrokenPipeError), self.process:  # waits, and closes the pipes
                pass
            self.process, self.said = None, b""


def verify_all(chosen: Sequence[str], effort: Effort, seed: int, children: int = 2) -> Iterator[Report]:
    """Check entries in child processes, some at a time; reports come as they are ready."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
    for name in chosen:
        waiting.put(name)

    def serve() -> None:
        child = _Child(effort, seed)
        try:
            while True:
                ready.put(child.ask(waiting.get_nowait()))
        except queue.Empty:
            pass
        finally:
            child.close()
            ready.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(children)]
    for thread in threads:
        thread.start()
    left = children
    while left:
        report = ready.get()
        if report is None:
            left -= 1
        else:
            yield report


# ---- the whole ------------------------------------------------------------------------------------------------------


def unreached(reports: Sequence[Report]) -> tuple[list[str], list[str]]:
    """The registered rules that nothing exercised: those that could run here, and those of other devices."""
    reached = {rule for report in reports for rule in report.rules}
    missing = [key for key in registry if key not in reached]
    here = [key for key in missing if _runs_here(key)]
    return here, [key for key in missing if key not in here]


def _runs_here(key: str) -> bool:
    packet, _, _ = key.partition(".")
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), name)
        for op in overloads(packet)
        for name in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    )


def summary(reports: Sequence[Report], by_rule: bool) -> str:
    """What all reports say together."""
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
        lines += ["", "rules, and what entries that use them showed:"]
        lines += [f"  {rule}: {', '.join(sorted(bad[rule])) or 'ok'}" for rule in sorted(bad)]
        here, elsewhere = unreached(reports)
        lines += ["", f"not reached by any entry: {', '.join(here) or 'none'}"]
        lines += [f"of other devices: {', '.join(elsewhere) or 'none'}"]
        whole = sorted({op for report in reports for op in report.whole})
        lines += ["", f"ran whole: {', '.join(whole) or 'none'}"]
        lines += ["", "could be cut, by the look of it:", *_hints(reports)]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.verify", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few entries, few placements")
    parser.add_argument("--only", metavar="NAME", help="entries whose name contains this")
    parser.add_argument("--limit", type=int, help="placements of each sample on each mesh")
    parser.add_argument("--seed", type=int, default=0, help="chooses samples and placements")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        *values, seed = json.loads(given.child)
        values[2] = tuple(map(tuple, values[2]))
        _work(Effort(*values), seed)
        return 0
    effort = QUICK if given.quick else Effort()
    if given.limit:
        effort = effort._replace(limit=given.limit)
    chosen = [name for name in names() if not given.only or given.only in name]
    if given.quick and not given.only:
        chosen = random.Random(given.seed).sample(chosen, QUICK_ENTRIES)
    reports, start = [], time.monotonic()
    for report in verify_all(chosen, effort, given.seed):
        reports.append(report)
        clock = f"{time.monotonic() - start:5.0f} s"
        print(f"{clock} {len(reports)}/{len(chosen)} {report.entry}: {report.status}, {report.cases} cases", flush=True)
    print(summary(reports, by_rule=not given.quick))
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
