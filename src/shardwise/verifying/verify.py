"""`verify`: compare the user's program on simulated ranks with one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..sharding.mesh import DeviceMesh
from ..sharding.placement import Placement
from .advice import advice, advice_without_mesh
from .cause import narrowed
from .comparing import Comparison
from .finding import Found, find
from .program import Program, run_alone, run_on_ranks
from .ranks import Axes
from .recording import Recording
from .report import Difference, Report
from .tolerance import Tolerances

__all__ = ["verify"]


def _sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def verify(
    build_model: Callable[[], nn.Module],
    apply: Callable[[nn.Module, DeviceMesh], nn.Module | None],
    batch: object,
    *,
    loss: Callable[..., Tensor] | None = None,
    mesh: Sequence[int] = (2, 2, 2),
    names: Sequence[str] | None = None,
    steps: int = 3,
    place: Callable[[Any, DeviceMesh], object] | Sequence[Placement] | None = None,
    step: Callable[..., object] | None = None,
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = _sgd,
    dtype: torch.dtype | None = torch.float64,
    distinct: bool = True,
    seed: int = 0,
    device: str = "cpu",
    isolate: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Train on simulated ranks and on one device, from the same parameters, and report the first tensor that differs.

    >>> report = verify(build_model, apply, (tokens, targets), loss=F.cross_entropy, mesh=(2,), names=("tp",))
    >>> report.ok, report.first                 # first is the path of the first tensor that differs
    (True, None)

    build_model  returns the model, for one device. It is called once for each run, from the same seed.
    apply        distributes the model over a mesh, in place or by returning another: `parallelize_module`,
                 `fully_shard`, or code with `to_local`, `from_local` and collectives of torch.distributed.
    batch        the arguments of the model: a tensor; a tuple that ends with the target; a dict of arguments by name;
                 or a function of the step that returns one. All ranks get all of it.
    loss         function of the model's output and the target (of the output alone for a tensor, of the output and the
                 batch for a dict). It may be left out if the model returns a loss.
    mesh, names  sizes and names of the axes.
    place        how a batch is distributed: placements for all its tensors, or a function of (batch, mesh).
    step         a training step of your own instead: `step(model, batch, mesh)` runs forward, backward and what the
                 program does with gradients, and returns the loss, or a dict of it and other values to be compared,
                 such as {"loss": loss, "grad_norm": norm}. On one device `mesh` is None. If it has an argument
                 `optimizer`, it runs the optimizer, too.
    optimizer    function of the parameters that returns an optimizer; None for a program without.
    dtype        what parameters and inputs are cast to, so that rounding is far smaller than any mistake. With None,
                 and where the model cannot run in it, they keep their own.
    distinct     whether parameters with equal elements (a bias of zeros) get some noise: they would hide mistakes.
    isolate      whether to run again with one axis after the other of size 1, to find the axes on which the difference
                 depends.
    progress     called with a label at the start of each run, and of the comparison.

    Ranks run in lockstep, so the program may slice with `mesh.get_local_rank()` or `dist.get_rank()`, but not branch on
    them. Raises whatever the program raises, unless a tensor that was computed before differs.
    """
    sizes = tuple(int(size) for size in mesh)
    axes = Axes(tuple(names) if names is not None else tuple(f"axis{place}" for place in range(len(sizes))), sizes)
    if len(axes.names) != len(sizes) or len(set(axes.names)) != len(sizes):
        raise InputError(f"verify got mesh={sizes} and names={names}", "give each axis a name of its own")
    batches = [batch(number) if callable(batch) else batch for number in range(steps)]
    program = Program(
        build_model, apply, batches, loss, place, optimizer, step, steps, seed, dtype, distinct, device
    )  # fmt: skip
    return _Verification(program, axes, progress or (lambda _: None)).run(isolate)


class _Verification:
    """One call of `verify`: the reference run, its tolerances, and the runs on meshes that are compared with it."""

    def __init__(self, program: Program, axes: Axes, progress: Callable[[str], None]) -> None:
        self.axes, self.progress, self.notes = axes, progress, list[str]()
        progress("on one device")
        try:
            self.reference, self.initial = run_alone(program)
        except Exception as error:
            if program.dtype is None:
                raise
            self._use_own_dtype(program, error)
            return
        self.program = program
        self._find_tolerances()

    def _use_own_dtype(self, program: Program, error: Exception) -> None:
        self.program = program.in_own_dtype()
        self.reference, self.initial = run_alone(self.program)
        message = (str(error).splitlines() or [""])[0]
        self.notes.append(f"compared in the model's own dtype: in {_name(program.dtype)} it raises {message!r}")
        self._find_tolerances()

    def _find_tolerances(self) -> None:
        self.progress("on one device, moved by rounding")
        eps = max(torch.finfo(dtype).eps for dtype in self.reference.dtypes or {torch.get_default_dtype()})
        moved = [run_alone(self.program, eps, seed)[0] for seed in (1, 2)]
        self.tolerances = Tolerances(self.reference, moved, eps)

    def run(self, isolate: bool) -> Report:
        """Compare a run on the mesh with the reference."""
        self.progress(f"on {len(self.axes.coordinates())} simulated ranks")
        found = run_on_ranks(self.program, self.axes, self.initial)
        comparison = Comparison(self.reference, found, self.tolerances, self.axes)
        self.progress("comparing")
        differing = find(comparison)
        if found.error is not None:
            if not differing and self.program.dtype is not None:
                self._use_own_dtype(self.program, found.error)
                return self.run(isolate)
            if not differing:
                raise found.error
            message = (str(found.error).splitlines() or [""])[0]
            self.notes.append(f"after that the program raised {type(found.error).__name__}: {message}")
        needed, text = self._needed(differing[0]) if differing and isolate else (None, "")
        notes = [*self.notes, *self._not_compared(found)]
        return Report(
            tuple(self._difference(one, found, differing, needed) for one in differing),
            sum(key in found.seen for key in self.reference.seen),
            str(self.axes),
            _name(max(self.reference.dtypes, key=lambda dtype: torch.finfo(dtype).eps)),
            text,
            tuple(notes),
        )

    def _needed(self, first: Found) -> tuple[tuple[str, ...] | None, str]:
        """Return the axes on which the difference depends (None if unknown), and a sentence that says so."""
        large = [name for name, size in zip(self.axes.names, self.axes.sizes, strict=True) if size > 1]
        steps = first.key.step + 1
        alone = self._differs(self._with_size_1(large), steps)
        if alone:
            return (), "it differs on a mesh of one rank, too: it does not depend on the mesh"
        without = {name: self._differs(self._with_size_1([name]), steps) for name in large} if len(large) > 1 else {}
        gone = [name for name, differs in without.items() if differs is False]
        if len(large) == 1 and alone is False:
            gone = large
        if not gone:
            return None, ""
        rest = [f"{name}=1" for name, differs in without.items() if differs]
        text = f"with {' or '.join(f'{name}=1' for name in gone)} nothing differs"
        return tuple(gone), text + (f"; with {' or '.join(rest)} it still does" if rest else "")

    def _with_size_1(self, names: list[str]) -> Axes:
        self.progress(f"with {', '.join(f'{name}=1' for name in names)}")
        pairs = zip(self.axes.names, self.axes.sizes, strict=True)
        return replace(self.axes, sizes=tuple(1 if name in names else size for name, size in pairs))

    def _differs(self, axes: Axes, steps: int) -> bool | None:
        """Return whether a run on another mesh differs; None if the program does not run on it."""
        program = replace(self.program, steps=max(steps, 1))
        try:
            found = run_on_ranks(program, axes, self.initial)
        except Exception:
            return None
        if found.error is not None:
            return None
        reference = _until(self.reference, program.steps)
        return bool(find(Comparison(reference, found, self.tolerances, axes)))

    def _difference(
        self, one: Found, found: Recording, differing: list[Found], needed: tuple[str, ...] | None
    ) -> Difference:
        seen = self.reference.seen[one.key]
        cause = one.outcome.cause
        assert cause is not None, "a tensor that differs has a cause"
        if needed is not None:
            cause = narrowed(cause, Axes(needed, tuple(map(self.axes.size, needed))))
        axes = cause.axes if needed is None else needed
        if needed == ():
            why, fix = advice_without_mesh(one.key, cause)
        else:
            why, fix = advice(one.key, cause, axes, found, common=_common_factor(differing), before=one.before)
        line = found.seen[one.key].line if one.key in found.seen else seen.line
        path = one.key.path or "output"
        return Difference(path, one.key.kind, one.key.step, f"{line}: {line.text}", cause.text, why, fix)

    def _not_compared(self, found: Recording) -> list[str]:
        """Return notes that name what was not compared, and parameters that are tied on one device only."""
        notes = []
        apart = [
            " and ".join(sorted(group))
            for group in self.reference.tied
            if not any(group <= other for other in found.tied)
        ]
        if apart:
            notes.append(f"tied on one device, but not on ranks: {'; '.join(apart)}")
        tied = {name for group in (*self.reference.tied, *found.tied) for name in group}
        missing = sorted((self.reference.names ^ found.names) - tied)
        if missing:
            more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
            notes.append(f"not compared, since one side only has them: {', '.join(missing[:6])}{more}")
        return notes


def _common_factor(differing: list[Found]) -> float | None:
    """Return the factor by which all wrong gradients differ; None if they have none in common."""
    causes = [one.outcome.cause for one in differing if one.key.kind == "gradient"]
    factors = {round(cause.factor, 4) for cause in causes if cause is not None and cause.pattern == "factor"}
    return factors.pop() if len(factors) == 1 and len(causes) > 1 else None


def _until(reference: Recording, steps: int) -> Recording:
    """Return the first steps of a recording."""
    part = Recording()
    part.__dict__.update(reference.__dict__)
    part.seen = {key: seen for key, seen in reference.seen.items() if key.step < steps}
    return part


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
