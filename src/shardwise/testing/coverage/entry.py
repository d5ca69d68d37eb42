"""All trials of one entry: correct answers, how its ops are dispatched, and placements without communication."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._torch import pytree
from ..._torch.ops import packet_name
from ..._torch.testing import operator_database
from ...dispatch.dispatcher import Planned
from ...dispatch.modes import explicit
from ...errors import CommunicationError
from ...ops.call import Call
from ...ops.registry import rule_for
from ...ops.served import KINDS, served_by
from ...sharding.placement import AnyShard, Partial, Placement, Replicate, Shard
from ...sharding.spec import TensorMeta
from ...tensor.dtensor import DTensor
from ..checker import Answer
from ..recording import Recorded
from .distribution import other_seeds, same_distribution
from .samples import MESHES, PLAIN, Placed, Sample, Sweep, choices, samples
from .sides import Side, Simulated
from .trial import Trial, called

KEPT = 3  # failures of an entry that are reported
MADE_OF = 4  # ops of a function that are named
LOCAL_TRIED = 40  # placements that are tried for being free of communication


class Effort(NamedTuple):
    """How much is tried: samples of an entry, placements of a sample; more samples while all takes few seconds."""

    samples: int = 3
    placements: int = 6
    most: int = 3
    seconds: float = 1.0
    local: bool = False
    """Whether to find the placements that need no communication."""


@dataclass
class Outcome:
    """The result of an entry."""

    name: str
    status: str = "ok"
    """`ok`, `wrong`, `error`; `crash` or `slow` for its process; `none` if it has no tensors to distribute."""
    samples: int = 0
    cases: int = 0
    random: bool = False
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    served: dict[str, str] = field(default_factory=dict)
    """How each op that was called is dispatched: `rule`, `generated`, `decomposition` or `gathered`."""
    rule: str = ""
    """The rule of the op of the same name for one sample; or the ops that the function calls."""
    local: list[str] = field(default_factory=list)
    """Placements of one sample that need no communication, forward."""

    @property
    def kind(self) -> str:
        """How the entry is dispatched: the worst kind among its ops."""
        return max(self.served.values(), key=KINDS.index, default="rule")

    def add(self, kind: str, text: str) -> None:
        """Add a failure; the worst kind becomes the status."""
        if len(self.failures) < KEPT:
            self.failures.append(f"{kind}: {text}")
        if self.status != "wrong":
            self.status = kind


def cover(name: str, effort: Effort, side: Side, seed: int = 0, sweep: Sweep = PLAIN) -> Outcome:
    """Try the samples of an entry, each with random placements on a mesh of 4 and on a mesh of 2x2 ranks."""
    outcome, start = Outcome(name), time.monotonic()
    with DTensor._op_dispatcher.recording() as plans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = samples(name, sweep, effort.most, seed)
        with side.meshes(MESHES) as meshes:
            for number, sample in enumerate(given):
                if number >= effort.samples and time.monotonic() - start > effort.seconds:
                    break
                if not _cover_sample(outcome, sample, number, effort, side, meshes, seed):
                    break
            outcome.served = dict(sorted(_served(plans)))
            outcome.rule = outcome.rule or _made_of(outcome.served)
            if effort.local and outcome.samples:
                largest = max(given, key=lambda sample: [min(tensor.dim(), 3) for tensor in sample.tensors])
                outcome.local = list(_local(largest, side, meshes[0]))
    if not outcome.cases and outcome.status == "ok":
        outcome.status = "none"
    outcome.seconds = time.monotonic() - start
    return outcome


def _cover_sample(
    outcome: Outcome, sample: Sample, number: int, effort: Effort, side: Side, meshes: list[DeviceMesh], seed: int
) -> bool:
    """Try one sample. Returns False if the ranks no longer agree."""
    try:
        trial = Trial(sample, seed + number)
    except Exception:
        return True  # PyTorch itself refuses it
    outcome.samples += 1
    outcome.random |= trial.random
    outcome.rule = outcome.rule or (_rule(sample.name, trial.calls) if effort.local else "")
    drawn: list[tuple[Answer, Answer]] = []
    for size, mesh in zip(MESHES, meshes, strict=True):
        for placements in choices(sample, size, effort.placements // len(MESHES), seed, number):
            outcome.cases += 1
            where = f"{_described(sample)} with {' '.join(map(short, placements))} on {size}"
            before = outcome.status, len(outcome.failures)
            try:
                with other_seeds(2 * outcome.cases):
                    found = trial.compare(side, mesh, placements)
                if trial.random and isinstance(side, Simulated):
                    with other_seeds(2 * outcome.cases + 1):
                        drawn.append((trial.again(), found))
            except AssertionError as error:
                outcome.add("wrong", f"{_text(error)} | {where}")
            except Exception as error:
                outcome.add("error", f"{type(error).__name__}: {_text(error)} | {where}")
            if not side.settle(before != (outcome.status, len(outcome.failures))):
                outcome.add("error", f"ranks do not agree | {where}")
                return False

    def again(number: int) -> Answer:
        with other_seeds(10_000 + number):
            return trial.again()

    if drawn and not same_distribution([a for a, _ in drawn], [b for _, b in drawn], side.global_value, again):
        outcome.add("wrong", f"another distribution than on one device | {_described(sample)}")
    return True


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _described(sample: Sample) -> str:
    def show(value: object) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, (list, tuple)) and any(isinstance(element, Tensor) for element in value):
            return f"[{', '.join(map(show, value))}]"
        return repr(value)

    named = [f"{name}={show(value)}" for name, value in sample.kwargs.items()]
    return f"({', '.join([*map(show, sample.args), *named])})"[:300]


def short(placements: Placed) -> str:
    """Return placements of one tensor as text: S0, R, P(sum), or a pair of them."""
    names = [_letter(placement) for placement in placements]
    return names[0] if len(names) == 1 else f"({','.join(names)})"


def _letter(placement: Placement) -> str:
    if isinstance(placement, AnyShard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else repr(placement)


# ---- how it was dispatched -------------------------------------------------------------------------------------------


def _served(plans: Sequence[Planned]) -> Iterator[tuple[str, str]]:
    """Yield how each op with a plan was dispatched; if calls differ, the worst kind."""
    found: dict[str, str] = {}
    for op, plan, *_ in plans:
        kind, name = served_by(op.func, plan is not None), str(op.func)
        found[name] = max(kind, found.get(name, KINDS[0]), key=KINDS.index)
    yield from found.items()


def _rule(name: str, calls: Sequence[Recorded]) -> str:
    """Return the rule of the op that an entry is named after, for one of its calls; empty if there is none."""
    names = {name.partition(":")[0].rpartition(".")[2].strip("_"), operator_database()[name].aten_name.strip("_")}
    for call in calls:
        found = rule_for(call.func)
        if found is not None and packet_name(call.func).removeprefix("aten::").strip("_") in names:
            args, kwargs = pytree.tree_map_only(Tensor, _meta, (call.args, call.kwargs))
            rule = found.rule(Call.make(call.func, args, kwargs, found.operands))
            return "" if rule is None else f"`{rule}`"
    return ""


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _made_of(served: dict[str, str]) -> str:
    """Return the ops that a function calls, the worst kinds first."""
    ops = sorted(served, key=lambda op: -KINDS.index(served[op]))
    packets = dict.fromkeys(op.split(".")[1] for op in ops)
    names = [name for name in packets if name not in ("clone", "detach", "alias")]
    return ", ".join(names[:MADE_OF]) + (", ..." if len(names) > MADE_OF else "")


def _local(sample: Sample, side: Side, mesh: DeviceMesh) -> Iterator[str]:
    """Yield the placements of a sample on a one-dimensional mesh that need no communication in forward."""
    options: list[list[Placement]] = []
    for tensor in sample.tensors:
        summed = [Partial("sum")] if tensor.is_floating_point() or tensor.is_complex() else []
        options.append([Replicate(), *(Shard(dim) for dim in range(tensor.dim())), *summed])
    combinations = itertools.islice(itertools.product(*options), 1, LOCAL_TRIED + 1)  # after all Replicate
    for chosen in combinations:
        made = {id(t): side.make(t.detach(), mesh, [p], 0) for t, p in zip(sample.tensors, chosen, strict=True)}
        try:
            with explicit(), torch.no_grad():
                called(sample, made)
        except (CommunicationError, RuntimeError, TypeError, ValueError, NotImplementedError):
            continue
        yield " ".join(map(_letter, chosen))
