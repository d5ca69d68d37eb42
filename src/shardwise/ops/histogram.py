"""Histograms: each rank counts what it holds, once all ranks agree on the edges of the bins.

Edges that go by the data are found first, by its minimum and maximum; densities are made of the counts of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .tables import COPES_WITH_EMPTY, INSTEAD, READS_SCALARS, register_table

aten = torch.ops.aten


def histc(call: Call) -> str | None:
    """Counts between given bounds are summed."""
    return "x.. -> _" if call.arg("min") != call.arg("max") else None


def histogram(call: Call) -> str | None:
    """Counts, or sums of weights, in bins that do not depend on data."""
    if call.arg("density") or (call.op._overloadname.startswith("bin_ct") and call.arg("range", None) is None):
        return None
    bins = "" if call.op._overloadname.startswith("bin_ct") else " [k],"
    return f"x..,{bins} x.. -> _, _ ; reduce sum, same"


def of_points(call: Call) -> str | None:
    """The same for points of several coordinates, the last dim."""
    given = "bins" in call.arguments and not isinstance(call.arg("bins")[0], int)
    if call.arg("density") or (not given and call.arg("range", None) is None):
        return None
    edges = call.op._schema.name.endswith("bin_edges")
    bins = " {_}," if given else ""
    return f"x.. [d],{bins} x.. -> {'{_}' if edges else '_..'}{' ; reduce same' if edges else ''}"


# ---- what is not yet so --------------------------------------------------------------------------------------------


def _bounds(values: Tensor) -> list[float]:
    return [values.min().item(), values.max().item()] if values.numel() else [0.0, 1.0]


def _counted(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    low, high = _bounds(x)
    if min != max or not math.isfinite(low) or not math.isfinite(high):
        return NotImplemented
    return aten.histc(x, bins, *((low - 1, high + 1) if low == high else (low, high)))


def _in_bins(x: Tensor, bins: int = 100, **options: Any) -> Any:
    density = options.pop("density", False)
    if options.get("range") and not density:
        return NotImplemented
    options["range"] = options.get("range") or _bounds(x)
    counts, edges = aten.histogram.bin_ct(x, bins, **options)
    return (_density(counts, [edges]) if density else counts), edges


def _between(x: Tensor, bins: Tensor, **options: Any) -> Any:
    if not options.get("density"):
        return NotImplemented
    counts, edges = aten.histogram.bins_tensor(x, bins, weight=options.get("weight"))
    return _density(counts, [edges]), edges


def _points_bounds(x: Tensor) -> list[float]:
    return [bound for column in x.flatten(0, -2).unbind(1) for bound in _bounds(column)]


def _points_edges(x: Tensor, bins: Sequence[int], **options: Any) -> Any:
    if options.get("range") and not options.get("density"):
        return NotImplemented
    return aten._histogramdd_bin_edges(x, bins, range=options.get("range") or _points_bounds(x))


def _points_in_bins(x: Tensor, bins: Sequence[int], **options: Any) -> Any:
    if options.get("range") and not options.get("density"):
        return NotImplemented
    bounds = options.get("range") or _points_bounds(x)
    counts = aten._histogramdd_from_bin_cts(x, bins, range=bounds, weight=options.get("weight"))
    edges = aten._histogramdd_bin_edges(x, bins, range=bounds)
    return _density(counts, edges) if options.get("density") else counts


def _points_between(x: Tensor, bins: Sequence[Tensor], **options: Any) -> Any:
    if not options.get("density"):
        return NotImplemented
    counts = aten._histogramdd_from_bin_tensors(x, bins, weight=options.get("weight"))
    return _density(counts, bins)


def _density(counts: Tensor, edges: Sequence[Tensor]) -> Tensor:
    density = counts / counts.sum()
    for dim, edge in enumerate(edges):
        density = density / (edge[1:] - edge[:-1]).view([-1 if d == dim else 1 for d in range(counts.dim())])
    return density


register_table(
    {
        "aten::histc": histc,
        "aten::histogram.bin_ct": histogram,
        "aten::histogram.bins_tensor": histogram,
        "aten::_histogramdd_bin_edges": of_points,
        "aten::_histogramdd_from_bin_cts": of_points,
        "aten::_histogramdd_from_bin_tensors": of_points,
    }
)
INSTEAD.update(
    {
        "aten::histc.default": _counted,
        "aten::histogram.bin_ct": _in_bins,
        "aten::histogram.bins_tensor": _between,
        "aten::_histogramdd_bin_edges.default": _points_edges,
        "aten::_histogramdd_from_bin_cts.default": _points_in_bins,
        "aten::_histogramdd_from_bin_tensors.default": _points_between,
    }
)
READS_SCALARS.add("aten::histc")
# What is the same on all ranks is so on one without data, too.
COPES_WITH_EMPTY |= {"aten::histogram.bin_ct", "aten::histogram.bins_tensor", "aten::_histogramdd_bin_edges"}
