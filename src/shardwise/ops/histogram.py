"""Histograms: each rank counts its own elements in bins whose edges are the same on all ranks.

Calls whose edges depend on data have no rule: they are decomposed into the minimum and maximum and a call with these
edges. Densities are decomposed into counts and a division.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch.ops import overload_name, packet_name
from .call import Call
from .registry import definitions_in

aten = torch.ops.aten
define = definitions_in(__name__)


def histc(call: Call) -> str | None:
    """Return the rule: counts between given bounds are summed."""
    return "x.. -> _" if call.arg("min") != call.arg("max") else None


def histogram(call: Call) -> str | None:
    """Return the rule: counts, or sums of weights, in bins that do not depend on data."""
    if call.arg("density") or (overload_name(call.op).startswith("bin_ct") and call.arg("range", None) is None):
        return None
    bins = "" if overload_name(call.op).startswith("bin_ct") else " [k],"
    return f"x..,{bins} x.. -> _, _ ; reduce sum, same"


def of_points(call: Call) -> str | None:
    """Return the rule: counts of points, whose coordinates are the last dim."""
    given = "bins" in call.arguments and not isinstance(call.arg("bins")[0], int)
    if call.arg("density") or (not given and call.arg("range", None) is None):
        return None
    edges = packet_name(call.op).endswith("bin_edges")
    bins = " {_}," if given else ""
    return f"x.. [d],{bins} x.. -> {'{_}' if edges else '_..'}{' ; reduce same' if edges else ''}"


# ---- by other calls ------------------------------------------------------------------------------------------------


def _bounds(values: Tensor) -> list[float]:
    return [values.min().item(), values.max().item()] if values.numel() else [0.0, 1.0]


def histc_of_data(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Return counts between the minimum and the maximum of the data."""
    if min != max:
        return NotImplemented
    low, high = _bounds(x)
    if not math.isfinite(low) or not math.isfinite(high):
        return NotImplemented
    return aten.histc(x, bins, *((low - 1, high + 1) if low == high else (low, high)))


def histogram_by_count(x: Tensor, bins: int = 100, **options: object) -> tuple[Tensor, Tensor]:
    """Return counts or densities in a number of bins, between minimum and maximum unless a range is given."""
    density = options.pop("density", False)
    if options.get("range") and not density:
        return NotImplemented
    options["range"] = options.get("range") or _bounds(x)
    counts, edges = aten.histogram.bin_ct(x, bins, **options)
    return (_density(counts, [edges]) if density else counts), edges


def histogram_by_edges(x: Tensor, bins: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Return densities between given edges."""
    if not options.get("density"):
        return NotImplemented
    counts, edges = aten.histogram.bins_tensor(x, bins, weight=options.get("weight"))
    return _density(counts, [edges]), edges


def _points_bounds(x: Tensor) -> list[float]:
    return [bound for column in x.flatten(0, -2).unbind(1) for bound in _bounds(column)]


def edges_of_points(x: Tensor, bins: Sequence[int], **options: object) -> list[Tensor]:
    """Return edges for points, between the minimum and the maximum of each coordinate."""
    if options.get("range") and not options.get("density"):
        return NotImplemented
    return aten._histogramdd_bin_edges(x, bins, range=options.get("range") or _points_bounds(x))


def points_by_count(x: Tensor, bins: Sequence[int], **options: object) -> Tensor:
    """Return counts or densities of points in numbers of bins."""
    if options.get("range") and not options.get("density"):
        return NotImplemented
    bounds = options.get("range") or _points_bounds(x)
    counts = aten._histogramdd_from_bin_cts(x, bins, range=bounds, weight=options.get("weight"))
    edges = aten._histogramdd_bin_edges(x, bins, range=bounds)
    return _density(counts, edges) if options.get("density") else counts


def points_by_edges(x: Tensor, bins: Sequence[Tensor], **options: object) -> Tensor:
    """Return densities of points between given edges."""
    if not options.get("density"):
        return NotImplemented
    counts = aten._histogramdd_from_bin_tensors(x, bins, weight=options.get("weight"))
    return _density(counts, bins)


def _density(counts: Tensor, edges: Sequence[Tensor]) -> Tensor:
    density = counts / counts.sum()
    for dim, edge in enumerate(edges):
        density = density / (edge[1:] - edge[:-1]).view([-1 if d == dim else 1 for d in range(counts.dim())])
    return density


define("aten::histc", histc, decomposition=histc_of_data, reads_numbers=True)
# Every rank returns the edges of the bins, so ranks without data call the op, too.
define("aten::histogram.bin_ct", histogram, decomposition=histogram_by_count, takes_empty=True)
define("aten::histogram.bins_tensor", histogram, decomposition=histogram_by_edges, takes_empty=True)
define("aten::_histogramdd_bin_edges", of_points, decomposition=edges_of_points, takes_empty=True)
define("aten::_histogramdd_from_bin_cts", of_points, decomposition=points_by_count)
define("aten::_histogramdd_from_bin_tensors", of_points, decomposition=points_by_edges)
