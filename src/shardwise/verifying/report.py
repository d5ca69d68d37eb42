"""The result of `verify`."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field

_WIDTH = 110


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the one-device run, and why.

    >>> report = verify(build_model, apply_wrongly, (tokens, targets), loss=F.cross_entropy, mesh=(2,), names=("tp",))
    >>> report.differences[0].what()
    'the output of 1'
    """

    path: str
    """Path of the module or parameter, or "loss", "grad_norm", "output"."""
    kind: str
    """The kind of tensor: "output", "gradient", "parameter", ..."""
    step: int
    line: str
    """The user's line, such as "train.py:31: x = self.norm(x)"."""
    how: str
    """How it differs, such as "is tp times too large (2 is the size of tp)"."""
    why: str = ""
    fix: str = ""

    def what(self) -> str:
        """Return the name of the tensor, such as "the gradient of norm.weight"."""
        return _named(self.kind, self.path)


@dataclass(frozen=True)
class Report:
    """The result of `verify`. `bool(report)` is True if nothing differs.

    >>> report = verify(build_model, apply, (tokens, targets), loss=F.cross_entropy, mesh=(2,), names=("tp",))
    >>> bool(report), report.compared > 0
    (True, True)
    """

    differences: tuple[Difference, ...]
    """All tensors that differ, in the order in which they are computed."""
    compared: int
    mesh: str
    dtype: str
    needed: str = ""
    """A sentence that says on which axes the difference depends, as found by runs with one axis of size 1."""
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether all tensors that must agree do."""
        return not self.differences

    @property
    def first(self) -> str | None:
        """The path of the first tensor that differs, in the order of the computation; None if none does."""
        return self.differences[0].path if self.differences else None

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {"ok": self.ok, "first": self.first, **asdict(self)}

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        where = f"{self.compared} tensors on mesh({self.mesh}) with one device, in {self.dtype}"
        if not self.differences:
            return "\n".join([f"ok: compared {where}", *_notes(self.notes)])
        first = self.differences[0]
        lines = [
            f"compared {where}: {len(self.differences)} differ",
            "",
            f"first, in step {first.step}: {first.what()}"
            if first.step >= 0
            else f"before the first step: {first.what()}",
        ]
        for name, text in (
            ("line", first.line), ("how", first.how), ("why", first.why), ("depends", self.needed), ("fix", first.fix)
        ):  # fmt: skip
            if text:
                lines += _entry(name, text)
        others = list(dict.fromkeys(difference.what() for difference in self.differences[1:]))
        if others:
            shown = "; ".join(others[:6]) + (f"; and {len(others) - 6} more" if len(others) > 6 else "")
            lines += ["", *textwrap.wrap(f"after it: {shown}", _WIDTH)]
        return "\n".join([*lines, *_notes(self.notes)])


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"  {name:8} ", subsequent_indent=" " * 11, break_long_words=False
    )


def _notes(notes: tuple[str, ...]) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")]


def _named(kind: str, path: str) -> str:
    if kind in ("loss", "value", "norm"):
        return f"the {path}"
    if kind == "initial":
        return f"the initial value of {path}"
    if kind in ("parameter", "buffer"):
        return f"the updated {kind} {path}"
    of = "the model" if path == "output" else path
    return f"the {kind} of {of}"
