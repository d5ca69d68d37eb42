"""`report`: one page about how a model is sharded and what a step communicates.

>>> report(model, "model.html")                          # how the parameters are sharded
>>> report(train_step, "step.html", model, batch)        # runs the step: also what it communicates, when and why
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ...comm.plan import bytes_text, seconds_text
from ...errors import InputError
from ..explaining.records import Total
from .findings import Finding, findings
from .folded import fold
from .holders import Held, held_tensors, memory_by_rank
from .page import page_html
from .sections import communication, explanations, overview, parameters, placements, timeline
from .step import Step, describe, run_step


@dataclass(frozen=True)
class Report:
    """The report of a step: a page (`html()`, `write(path)`), plain values (`to_dict()`), and warnings.

    >>> found = report(lambda: x.redistribute(placements=P()))
    >>> found.total.count
    >>> found.write(folder / "step.html")
    """

    title: str
    step: Step
    tensors: list[Held] = field(repr=False)
    warnings: list[Finding]

    @property
    def total(self) -> Total:
        """How much the step communicates."""
        return Total.of(self.step.communications)

    @property
    def result(self) -> object:
        """What the step returned."""
        return self.step.result

    def html(self) -> str:
        """Return the page."""
        folded = fold(self.step.communications)
        sections = {
            "Overview": overview(self._figures(), self.warnings),
            "Placements": placements(self.tensors, self.step.meshes),
            "Parameters": parameters(self.tensors),
            "Communication": communication(self.step.communications, folded),
            "Timeline": timeline(self.step.spans, modelled=self.step.modelled),
            "Explanations": explanations(folded),
        }
        return page_html(self.title, f"shardwise report · torch {torch.__version__}", sections)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "version": 1,
            "title": self.title,
            "total": self.total.to_dict(),
            "tensors": [each.to_dict() for each in self.tensors],
            "memory": {str(rank): held for rank, held in memory_by_rank(self.tensors).items()},
            "communications": [each.to_dict() for each in self.step.communications],
            "timeline": [{**span._asdict(), "about": dict(span.about)} for span in self.step.spans],
            "warnings": [finding.to_dict() for finding in self.warnings],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def _figures(self) -> dict[str, str]:
        memory, total = memory_by_rank(self.tensors), self.total
        return {
            "ranks": str(len(memory) or len({span.rank for span in self.step.spans})),
            "parameters": bytes_text(sum(each.total for each in self.tensors)),
            "held per rank": bytes_text(max(memory.values(), default=0)),
            "collectives": str(total.count),
            "received per rank": bytes_text(total.bytes),
            "communication time": seconds_text(total.seconds) if total.count else "0",
            "warnings": str(len(self.warnings)),
        }


def report(
    subject: nn.Module | Callable[..., object],
    path: str | os.PathLike[str] | None = None,
    *args: object,
    title: str | None = None,
    **kwargs: object,
) -> Report:
    """Run `subject(*args, **kwargs)`, and write a page about it to `path`; return the `Report`.

    The subject is a step: a function that calls modules, runs a backward pass, updates parameters. The page shows how
    the parameters of these modules are sharded, what is communicated, by which line and module and why, and what to
    look at. A module without arguments is not run: the page then shows its parameters.

    On processes, call it on every rank: each rank runs the step, and the first one writes the page.

    >>> found = report(model, folder / "model.html")        # how the parameters are sharded
    >>> found = report(lambda batch: model(batch).sum(), folder / "step.html", torch.ones(2, 4))
    """
    if not callable(subject):
        raise InputError(
            f"report got a subject of type {type(subject).__name__}", "pass a module, or a function that runs a step"
        )
    name = title or _name(subject)
    if isinstance(subject, nn.Module) and not args and not kwargs:
        step = describe({type(subject).__name__: subject})
    else:
        step = run_step(subject, args, kwargs)
        if isinstance(subject, nn.Module):
            own = describe({type(subject).__name__: subject})
            step.parameters, step.buffers = own.parameters, own.buffers
    made = report_of(step, name)
    if path is not None and _is_first_rank():
        made.write(path)
    return made


def report_of(step: Step, title: str) -> Report:
    """Return the report of a step that has run."""
    tensors = held_tensors(step.parameters, step.buffers)
    return Report(title, step, tensors, findings(tensors, step.communications))


def _name(subject: object) -> str:
    return type(subject).__name__ if isinstance(subject, nn.Module) else getattr(subject, "__name__", "step")


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
