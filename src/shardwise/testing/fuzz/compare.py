"""The difference between the outcomes of a program on plain and on distributed tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import SavedTensorError
from .outcome import Outcome, Seen

KINDS = ("crash", "error", "value", "meta", "plain", "stride", "offset")
DEVIATIONS = 32.0  # how much farther than noise a result may be
Noisy = Callable[[], Sequence[Outcome]]


class Failure(NamedTuple):
    """A difference: its kind, one of `KINDS`, where it is, and what was expected and found."""

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}: {self.text}"


def difference(plain: Outcome, found: Outcome, noisy: Noisy, ignored: Sequence[str] = ()) -> Failure | None:
    """Return the first difference, the worst kind first.

    `noisy` returns outcomes of the plain program with rounding errors added: a result is compared as far as rounding
    errors leave it defined.
    """
    if any(isinstance(error, SavedTensorError) for error in found.errors.values()):
        return None  # one device raises its error later, in the backward pass, if there is one
    if any(_is_of_another_shape(name, plain) for name in plain.seen):
        return None
    failures = [*_errors(plain, found), *_variables(plain, found)]
    failures = [failure for failure in failures if failure.kind not in ignored]
    if not failures:
        return None
    others: Sequence[Outcome] | None = None
    for failure in sorted(failures, key=lambda failure: KINDS.index(failure.kind)):
        if failure.kind in ("error", "value", "meta", "stride"):
            others = noisy() if others is None else others
            if _undefined(failure, plain, found, others):
                continue
        return failure
    return None


def _is_of_another_shape(name: str, plain: Outcome) -> bool:
    """Return whether this is the gradient of a leaf that had another shape when it was used.

    Autograd takes it as it is, or raises an error, depending on who else holds it inside autograd.
    """
    gradient, leaf = plain.seen[name], plain.seen.get(name.removesuffix(".grad"))
    return isinstance(gradient, Seen) and isinstance(leaf, Seen) and gradient.shape != leaf.shape


def _errors(plain: Outcome, found: Outcome) -> list[Failure]:
    for line in sorted({*plain.errors, *found.errors}):
        wanted, have = plain.errors.get(line), found.errors.get(line)
        if have is None:
            return [Failure("error", f"line {line}", f"{_error(wanted)}, but distributed tensors raise nothing")]
        if wanted is None:
            return [Failure("error", f"line {line}", f"nothing, but distributed tensors raise {_error(have)}")]
        if not isinstance(have, _base(wanted)):
            return [Failure("error", f"line {line}", f"{_error(wanted)}, but distributed tensors raise {_error(have)}")]
    return []


def _base(error: Exception) -> type[Exception]:
    return RuntimeError if isinstance(error, RuntimeError) else type(error)


def _error(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def _variables(plain: Outcome, found: Outcome) -> list[Failure]:
    failures = []
    for name in sorted({*plain.seen, *found.seen}):
        if name not in found.seen or name not in plain.seen:
            side = "plain" if name in plain.seen else "distributed"
            failures.append(Failure("value" if ".grad" in name else "error", name, f"only {side} tensors have it"))
            continue
        failure = _variable(name, plain.seen[name], found.seen[name])
        if failure:
            failures.append(failure)
    return failures


def _variable(name: str, wanted: object, have: object) -> Failure | None:
    if not isinstance(wanted, Seen):
        if _same_object(wanted, have):
            return None
        return Failure("value", name, f"{wanted!r} expected, {have!r} found")
    if isinstance(have, Exception):
        return Failure("value", name, f"{wanted.value.tolist()} expected, but {_error(have)}")
    if not isinstance(have, Seen):
        return Failure("plain", name, f"a distributed tensor expected, {have!r} found")
    if (wanted.dtype, wanted.shape) != (have.dtype, have.shape) or have.value.shape != wanted.shape:
        return Failure("meta", name, f"{_meta(wanted)} expected, {_meta(have)} found")
    if not close(have.value, wanted.value):
        return Failure("value", name, f"{wanted.value.tolist()} expected, {have.value.tolist()} found")
    # A comparison in place lets an integer tensor of PyTorch require a gradient, which it cannot have.
    floats = wanted.dtype.is_floating_point or wanted.dtype.is_complex
    if wanted.requires_grad != have.requires_grad and floats:
        return Failure("meta", name, f"requires_grad={wanted.requires_grad} expected")
    if _strides(wanted) != _strides(have):
        return Failure("stride", name, f"{wanted.stride} expected, {have.stride} found, of {_meta(wanted)}")
    # Whether `.grad` of a leaf is a view of another gradient or a copy depends on who else holds that gradient inside
    # autograd, not on the program.
    if wanted.offset != have.offset and 0 not in wanted.shape and not name.endswith(".grad"):
        return Failure("offset", name, f"{wanted.offset} expected, {have.offset} found")
    return None


def _same_object(wanted: object, have: object) -> bool:
    if isinstance(wanted, float) and isinstance(have, float):
        return close(torch.tensor(have), torch.tensor(wanted))
    if isinstance(wanted, list) and isinstance(have, list):
        return len(wanted) == len(have) and all(map(_same_object, wanted, have))
    if isinstance(wanted, (Exception, Seen)):  # their contents are compared elsewhere
        return type(wanted) is type(have)
    return type(wanted) is type(have) and wanted == have


def _meta(seen: Seen) -> str:
    return f"{seen.dtype}{list(seen.shape)}"


def _strides(seen: Seen) -> list[int]:
    """Return the strides that matter: those of dims with several indices."""
    if 0 in seen.shape:
        return []
    return [stride for size, stride in zip(seen.shape, seen.stride, strict=True) if size > 1]


def close(value: Tensor, wanted: Tensor, deviation: float = 0.0) -> bool:
    """Return whether two tensors are equal, up to rounding errors of a few sums if they are floats."""
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        return torch.equal(value, wanted)
    eps = torch.finfo(wanted.dtype).eps
    finite = wanted[wanted.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    few = 64 if eps < 1e-4 else 6
    if wanted.dtype.is_complex:  # whether a product overflows to infinity or NaN depends on its order
        known = wanted.isfinite()
        if not torch.equal(known, value.isfinite()):
            return False
        value, wanted = value[known], wanted[known]
    return torch.allclose(value, wanted, rtol=few * eps, atol=few * eps * scale + deviation, equal_nan=True)


def _undefined(failure: Failure, plain: Outcome, found: Outcome, others: Sequence[Outcome]) -> bool:
    """Return whether rounding errors explain a difference."""
    if failure.kind == "error":
        return any(_errors(plain, other) for other in others)
    name = failure.where
    if name not in plain.seen or name not in found.seen:
        return any((name in other.seen) != (name in plain.seen) for other in others)
    wanted, have = plain.seen[name], found.seen[name]
    if not isinstance(wanted, Seen) or not isinstance(have, Seen):
        return any(not _same_object(wanted, other.seen.get(name)) for other in others)
    deviation = 0.0
    for other in others:
        value = other.seen.get(name)
        if not isinstance(value, Seen) or value.shape != wanted.shape or value.dtype != wanted.dtype:
            return True
        if failure.kind == "stride" and _strides(value) != _strides(wanted):
            return True
        if failure.kind in ("meta", "stride"):
            continue
        if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
            if not torch.equal(value.value, wanted.value):
                return True
            continue
        if not torch.equal(_special(value.value), _special(wanted.value)):
            return True
        finite = (value.value - wanted.value).abs()[wanted.value.isfinite()]
        deviation = max(deviation, float(finite.max()) if finite.numel() else 0.0)
    return deviation > 0 and close(have.value, wanted.value, DEVIATIONS * deviation)


def _special(value: Tensor) -> Tensor:
    """Return which numbers are infinite, with their sign, or NaN, and 0 for the others."""
    parts = torch.view_as_real(value) if value.is_complex() else value
    return torch.where(parts.isnan(), 2.0, torch.where(parts.isinf(), parts.sign(), 0.0))
