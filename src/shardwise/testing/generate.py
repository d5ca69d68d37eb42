"""The generated table of rules: `make rules`, or

    python -m shardwise.testing.generate [--only NAME] [--entries NAME]

First all entries of PyTorch's operator database and of our own samples run, forward and backward, and calls of ops
without a hand-written rule are recorded. Then each of these ops is probed in a child process, and the rules that are
found are written to ops/generated.txt, sorted; with an option they are printed instead. The same versions give the same
file.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from .._torch.ops import OpOverload, overload_name
from ..ops import generated
from ..ops.generated import Line
from ..ops.op import Never
from ..ops.registry import resolve
from ..ops.resolve import NEEDS_DATA
from ..ops.schema import operands_of, overload_key, overloads, variant_of
from ..ops.served import served_by
from .calls import try_call
from .checker import Sample, tensors_in
from .children import Lost, in_children
from .discovery import found_lines
from .probe_samples import PROBED
from .recording import Recorded, call_key, recorded
from .samples import names, samples

SAMPLES = 12  # of an entry
CALLS = 80  # of an op
CHUNK = 25  # entries that a child runs
SECONDS = 300.0  # for an op; more than any op needs, so that slow machines write the same table

HEADER = """\
# Rules found by probing, for ops without a hand-written rule. Made by `make rules`, with torch {version}.
# Do not edit: a hand-written rule belongs in the file of its family, and takes precedence over this table.
# Each line: the op, the calls it is for (ranks of operands, values of arguments; nothing: all calls), the rule.
"""

Portable = tuple[str, tuple[object, ...], dict[str, object]]
"""A call with the name of its op, which unlike the op can be pickled."""

K = TypeVar("K")
R = TypeVar("R")


def has_no_rule(func: OpOverload) -> bool:
    """Return whether an op is probed: a pure function of tensors without a hand-written rule or decomposition."""
    if not operands_of(func) or variant_of(func) != "functional" or NEEDS_DATA & set(func.tags):
        return False
    if func.namespace != "aten" or isinstance(resolve(func).op.rule, Never):
        return False
    return served_by(func) in ("generated", "gathered") and torch.Tag.nondeterministic_seeded not in func.tags


def all_samples(name: str) -> list[Sample]:
    """Return the samples of an entry, our own or the database's."""
    if name in PROBED:
        return [Sample(*row, grad=False) for row in PROBED[name]()]
    return samples(name, SAMPLES, 0)


def calls_of(entries: Sequence[str]) -> list[Portable]:
    """Return the calls of probed ops that these entries make."""
    found: dict[Hashable, Recorded] = {}
    for name in entries:
        for sample in all_samples(name):
            calls = recorded(*sample)
            found |= {call_key(*call): call for call in calls or () if has_no_rule(call.func) and _is_dense(call)}
    return [(overload_key(call.func), call.args, call.kwargs) for call in found.values()]


def _is_dense(call: Recorded) -> bool:
    return all(tensor.layout is torch.strided for tensor in tensors_in(call))


def _op(key: str) -> OpOverload | None:
    """Return the op with this name; None if its module is not loaded in this process."""
    name, _, overload = key.partition(".")
    return next((op for op in overloads(name) if overload_name(op) == overload), None)


def collected(entries: Sequence[str]) -> dict[str, list[Recorded]]:
    """Return the calls to probe, by op."""
    chunks = [entries[i : i + CHUNK] for i in range(0, len(entries), CHUNK)]
    answers = _results_of("running entries", {str(i): partial(calls_of, chunk) for i, chunk in enumerate(chunks)})
    crashed = [name for i, chunk in enumerate(chunks) if isinstance(answers[str(i)], Lost) for name in chunk]
    retried = {name: partial(calls_of, [name]) for name in crashed}
    answers |= _results_of("running entries of chunks that crashed", retried) if retried else {}
    calls: dict[str, dict[Hashable, Recorded]] = {}
    for _, answer in sorted(answers.items(), key=lambda item: item[0]):
        for key, args, kwargs in () if isinstance(answer, Lost) else answer:
            op = _op(key)
            if op is not None:
                call = Recorded(op, args, kwargs)
                calls.setdefault(key, {}).setdefault(call_key(*call), call)
    return {key: list(kept.values())[:CALLS] for key, kept in sorted(calls.items())}


def probed(calls: dict[str, list[Recorded]]) -> Iterator[tuple[str, list[Line], str]]:
    """Yield the lines of each op, or why it has none."""
    answers = _results_of("probing ops", {op: partial(found_lines, some, "", 0) for op, some in calls.items()})
    again = [op for op, answer in answers.items() if answer == Lost("crash")]
    gently = {op: partial(found_lines, calls[op], "", 0, gentle=True) for op in again}
    answers |= _results_of("probing ops gently", gently) if again else {}
    for op, answer in sorted(answers.items(), key=lambda item: item[0]):
        yield (op, [], answer.reason) if isinstance(answer, Lost) else (op, *answer)


def _results_of(what: str, jobs: Mapping[K, Callable[[], R]]) -> dict[K, R | Lost]:
    """Run jobs in child processes, and print the progress."""
    answers, start = {}, time.monotonic()
    for name, answer in in_children(jobs, seconds=SECONDS):
        answers[name] = answer
        print(f"{time.monotonic() - start:4.0f} s {what}: {len(answers)}/{len(jobs)}", file=sys.stderr, flush=True)
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="probe ops whose name contains this, and print their rules")
    parser.add_argument(
        "--entries", metavar="NAME", default="", help="use samples whose name contains this, and print the rules"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    x = torch.ones(3)
    try_call(Recorded(torch.ops.aten.neg.default, (x,), {}), (2,))  # loads all modules before the first fork
    calls = collected([name for name in (*PROBED, *names()) if given.entries in name])
    chosen = {op: c for op, c in calls.items() if not given.only or given.only in op}
    lines: list[Line] = []
    for op, found, problem in probed(chosen):
        lines += found
        if problem:
            print(f"{op}: {problem.splitlines()[0]}", file=sys.stderr)
    text = "".join(f"{line}\n" for line in sorted(map(str, lines)))
    if given.only or given.entries:
        print(text, end="")
    else:
        path = Path(generated.__file__).with_name(generated.FILE)
        path.write_text(HEADER.format(version=torch.__version__.partition("+")[0]) + text)
        print(f"{len(lines)} lines for {len({line.op for line in lines})} of {len(calls)} ops in {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
