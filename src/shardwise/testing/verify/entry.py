"""Verifying one entry: the function, and each op that it calls."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed.device_mesh import init_device_mesh

from ..._torch.ops import OpOverload
from ...comm.groups import adopt
from ...dispatch.fallback import GatherWarning
from ...ops.registry import rule_for
from ...ops.served import served_by
from ...tensor.dtensor import DTensor
from ...world import simulate
from ..calls import Failure, try_call
from ..checker import MESHES, Sample, check
from ..probe import Suggestion, probe
from ..recording import Recorded, call_key, recorded
from ..samples import samples

QUICK_MESHES: tuple[tuple[int, ...], ...] = ((3,), (2, 2))
CALLS_OF_AN_OP = 10  # with different shapes, in one process


class Effort(NamedTuple):
    """How much is tried: samples of an entry, placements of a sample on a mesh, seconds for an entry."""

    samples: int = 3
    limit: int = 4
    meshes: tuple[tuple[int, ...], ...] = MESHES
    seconds: float = 10.0
    probing: bool = True


FULL = Effort()
QUICK = Effort(samples=1, limit=2, meshes=QUICK_MESHES, seconds=2.0, probing=False)


@dataclass
class Report:
    """The result of an entry: cases compared, rules used, ops that ran on gathered inputs, and failures."""

    entry: str
    cases: int = 0
    rules: list[str] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)

    @property
    def status(self) -> str:
        """`ok`, or the worst failure: `crash`, `slow`, `wrong` or `error`."""
        kinds = {failure.kind for failure in self.failures}
        return next((kind for kind in ("crash", "slow", "wrong", "error") if kind in kinds), "ok")


class Tried:
    """The calls that were tried so far: one op with a few shapes is enough for many entries."""

    def __init__(self) -> None:
        self._keys: dict[OpOverload, set[Hashable]] = {}

    def add(self, call: Recorded) -> bool:
        """Add a call. Returns False if it was tried before, or its op often enough."""
        seen = self._keys.setdefault(call.func, set())
        key = call_key(*call)
        if key in seen or len(seen) >= CALLS_OF_AN_OP:
            return False
        seen.add(key)
        return True


def verify(name: str, effort: Effort = QUICK, seed: int = 0, tried: Tried | None = None) -> Report:
    """Check one entry by name, in this process."""
    return verify_samples(name, samples(name, effort.samples, seed), effort, seed, tried)


def verify_samples(
    name: str, given: Sequence[Sample], effort: Effort = QUICK, seed: int = 0, tried: Tried | None = None
) -> Report:
    """Check these samples, and the ops that they call unless those were `tried` before."""
    report = Report(name)
    tried = Tried() if tried is None else tried
    deadline = time.monotonic() + effort.seconds
    for sample in given:
        calls = recorded(*sample)
        if calls is None:
            break  # it draws random numbers, which differ from PyTorch's
        _check_function(sample, effort, seed, report)
        for call in calls:
            if time.monotonic() < deadline and tried.add(call):
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
        except Exception as error:
            report.failures.append(Failure.of(error, report.entry))
    for op, plan, *_ in plans:
        if plan is not None:
            report.rules.append(op.key)
        elif served_by(op.func, planned=False) == "gathered":
            report.gathered.append(str(op.func))
    report.rules, report.gathered = sorted(set(report.rules)), sorted(set(report.gathered))


def _called(fn: Callable[..., object]) -> Callable[..., object]:
    """Return the function of (args, kwargs), so that no argument is taken for an option of `check`."""

    def call(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        return fn(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", str(fn))
    return call


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
    """Return hints for the rules of the ops that an entry calls."""
    found: list[Suggestion] = []
    with simulate(2):
        mesh_info = adopt(init_device_mesh("cpu", (2,)))
        for sample in samples(name, effort.samples, seed):
            for call in recorded(*sample) or ():
                found += probe(call, mesh_info)
    return list(dict.fromkeys(found))
