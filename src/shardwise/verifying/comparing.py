"""Comparing one tensor of a run on ranks with the same tensor of the run on one device.

Some tensors must agree: the loss, gradients, norms, parameters and buffers. Activations may be distributed in any way
that the program likes; they are compared if a simple distribution reproduces them, and show where a difference begins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .cause import Cause, find_cause, subsets
from .distribution import Distribution, explain
from .ranks import Axes, Close, Ranks, held
from .recording import Key, Recording
from .tolerance import Tolerances, closeness, largest

MUST_AGREE = ("initial", "loss", "value", "gradient", "norm", "clipped gradient", "parameter", "buffer")
_OF_STATE = ("initial", "gradient", "clipped gradient", "parameter", "buffer")

Status = Literal["same", "suspect", "differs", "unknown"]
"""A tensor is suspect if it equals the reference only after a reduction or in another order, as may be intended."""


@dataclass(frozen=True)
class Outcome:
    """Whether a tensor equals the reference, and how it differs if not."""

    status: Status
    cause: Cause | None = None
    distribution: Distribution | None = None


_SAME = Outcome("same")


class Comparison:
    """Compares the tensors of two runs, one at a time."""

    def __init__(self, reference: Recording, found: Recording, tolerances: Tolerances, axes: Axes) -> None:
        self.reference, self.found, self.tolerances, self.axes = reference, found, tolerances, axes
        self._outcomes: dict[Key, Outcome] = {}
        self._indices: dict[str, Ranks] = {}
        """Of a parameter that is local: which elements of the reference each rank holds."""
        self._scales: dict[int, float] = {}
        self._calls = _calls(reference), _calls(found)

    def outcome(self, key: Key) -> Outcome:
        """Compare the tensor of this key."""
        if key not in self._outcomes:
            self._outcomes[key] = self._compare(key)
        return self._outcomes[key]

    def _compare(self, key: Key) -> Outcome:
        if key not in self.found.seen:
            return self._missing(key)
        if key.kind not in MUST_AGREE and not self._called_alike(key):
            return Outcome("unknown")
        close = closeness(self.tolerances.of(key))
        reference = held(self.reference.seen[key].value, self.axes, close).first()
        got = held(self.found.seen[key].value, self.axes, close)
        if key.kind in _OF_STATE:
            return self._state(key, got, reference, close)
        if key.kind == "output gradient":
            scale = self._scale(key, got, reference, close)
            got = Ranks(got.axes, {at: value / scale for at, value in got.values.items()})
        return self._activation(got, reference, close, partial=key.kind not in ("norm", "value"))

    def _missing(self, key: Key) -> Outcome:
        value = self.reference.seen[key].value
        if key.kind != "gradient" or key.path not in self.found.names or self.found.error or not largest(value):
            return Outcome("unknown")  # a module or parameter that the ranks do not have
        return Outcome("differs", Cause("missing", "is None on the ranks: nothing that they compute depends on it"))

    def _called_alike(self, key: Key) -> bool:
        """Return whether a module is called as often in both runs; with microbatches on ranks alone it is not."""
        alone, on_ranks = (calls.get((key.step, key.path)) for calls in self._calls)
        return alone == on_ranks or self.found.error is not None

    # ---- activations, losses, norms -------------------------------------------------------------------------------

    def _activation(self, got: Ranks, reference: Tensor, close: Close, *, partial: bool) -> Outcome:
        distribution = explain(got, reference, close, partial=partial)
        if distribution is not None:
            if distribution.permuted and distribution.unsharded:
                return Outcome("suspect", Cause("permuted", "has the elements of the reference in another order"))
            if not distribution.partial:
                return Outcome("same", None, distribution)
            total = 'Partial("sum")' in dict(distribution.placements).values()
            how = "sum" if total else "average"
            over = " and ".join(distribution.partial)
            text = f"is not reduced: only the {how} over {over} is the reference"
            return Outcome("suspect", Cause("sum" if total else "average", text, distribution.partial), distribution)
        want = _likely(got, reference)
        if want is None:
            shapes = sorted({tuple(value.shape) for value in got.values.values()})
            listed = " or ".join(str(list(shape)) for shape in shapes)
            text = f"has shape {listed} on ranks, and {list(reference.shape)} on one device"
            return Outcome("differs", Cause("shape", text))
        return Outcome("differs", find_cause(got, want, close, self.axes))

    def _scale(self, key: Key, got: Ranks, reference: Tensor, close: Close) -> float:
        """Return the factor between all activations' gradients of a step on ranks and those of the reference.

        Where n ranks each average the loss of their own rows, gradients of activations are n times larger, until
        gradients of parameters are averaged. The first gradient of the step determines the factor.
        """
        if key.step not in self._scales:
            sizes = sorted({1.0, *(_product(self.axes, names) for names in subsets(self.axes.names))})
            fits = (
                scale
                for scale in [*sizes, *(1 / size for size in sizes)]
                if explain(
                    Ranks(got.axes, {at: value / scale for at, value in got.values.items()}),
                    reference,
                    close,
                    partial=scale == 1.0,
                )
            )
            self._scales[key.step] = next(fits, 1.0)
        return self._scales[key.step]

    # ---- parameters, their gradients, buffers ---------------------------------------------------------------------

    def _state(self, key: Key, got: Ranks, reference: Tensor, close: Close) -> Outcome:
        if key.kind == "initial" and got.axes:
            found = _indices(got, reference, close)
            if found is not None:
                self._indices[key.path] = found
        want = self._expected(key, got, reference)
        if want is None:
            shapes = sorted({tuple(value.shape) for value in got.values.values()})
            text = f"has shape {list(shapes[0])} on ranks, which cannot be a shard of {list(reference.shape)}"
            return Outcome("differs", Cause("shape", text))
        if all(close(value, want.values[at]) for at, value in got.values.items()):
            return _SAME
        return Outcome("differs", find_cause(got, want, close, self.axes))

    def _expected(self, key: Key, got: Ranks, reference: Tensor) -> Ranks | None:
        """Return what each rank should hold of a parameter."""
        indices = self._indices.get(key.path)
        if indices is not None and indices.axes == got.axes:
            flat = reference.flatten()
            return Ranks(got.axes, {at: flat[indices.values[at]] for at in got.values})
        if all(value.shape == reference.shape for value in got.values.values()):
            return Ranks(got.axes, dict.fromkeys(got.values, reference))
        return _likely(got, reference)


def _calls(recording: Recording) -> dict[tuple[int, str], int]:
    """Return how often each module is called in each step."""
    found: dict[tuple[int, str], int] = {}
    for key in recording.seen:
        if key.kind == "output":
            found[key.step, key.path] = max(found.get((key.step, key.path), 0), key.call + 1)
    return found


def _indices(got: Ranks, reference: Tensor, close: Close) -> Ranks | None:
    """Return the index into the flat reference of every element that ranks hold, or None if some are not in it.

    It works for any layout, interleaved and transposed ones included, if the elements of the reference are distinct.
    """
    if all(value.shape == reference.shape and close(value, reference) for value in got.values.values()):
        indices = torch.arange(reference.numel()).view(reference.shape)
        return Ranks(got.axes, dict.fromkeys(got.values, indices))
    values, order = reference.flatten().sort()
    if not len(values) or bool((values[1:] == values[:-1]).any()):
        return None
    found: dict[tuple[int, ...], Tensor] = {}
    for at, value in got.values.items():
        place = torch.searchsorted(values, value.contiguous()).clamp(max=len(values) - 1)
        if not close(values[place], value):
            return None
        found[at] = order[place]
    return Ranks(got.axes, found)


# ---- what local tensors probably are ---------------------------------------------------------------------------------


def _likely(got: Ranks, reference: Tensor) -> Ranks | None:
    """Return the shards of the reference with the shapes that ranks hold: of several shardings, the closest one."""
    if all(value.shape == reference.shape for value in got.values.values()):
        return Ranks(got.axes, dict.fromkeys(got.values, reference))
    if got.first().dim() != reference.dim():
        return None
    best: tuple[float, Ranks] | None = None
    for dims in itertools.product([None, *range(reference.dim())], repeat=len(got.axes)):
        want = _sharded(got, reference, dims)
        if all(value.shape == want.values[at].shape for at, value in got.values.items()):
            apart = sum(largest(value.double() - want.values[at].double()) for at, value in got.values.items())
            if best is None or apart < best[0]:
                best = apart, want
    return best[1] if best else None


def _sharded(got: Ranks, reference: Tensor, dims: tuple[int | None, ...]) -> Ranks:
    sizes = [1 + max(at[place] for at in got.values) for place in range(len(got.axes))]
    found = {}
    for at in got.values:
        value = reference
        for index, size, dim in zip(at, sizes, dims, strict=True):
            if dim is not None:
                rows = -(-value.shape[dim] // size) if value.shape[dim] else 0
                start = min(index * rows, value.shape[dim])
                value = value.narrow(dim, start, min(rows, value.shape[dim] - start))
        found[at] = value
    return Ranks(got.axes, found)


def _product(axes: Axes, names: tuple[str, ...]) -> float:
    size = 1.0
    for name in names:
        size *= axes.size(name)
    return size
