"""Inspect distributed tensors and the communication of programs.

visualize_sharding    prints which ranks hold which shards of a tensor
draw                  returns the same picture as a string
CommDebugMode         counts and prints the communication in a block, module by module
explain               says why a block communicates: lines, modules, reasons, prices, alternatives, edits; as text,
                      as JSON, as a trace. What it holds is described in `explaining/records.py`
budget                raises an error with that explanation if a block communicates more than it may
trace, merge_traces   write what ranks compute and communicate, and when, for chrome://tracing and ui.perfetto.dev
report                writes one page about a step: placements, memory, communication, timeline, reasons, warnings
show                  draws a tensor, spec, plan, mesh or module in a notebook; after `%load_ext shardwise.debug`
                      meshes and modules draw themselves, too
watch                 stops all ranks when they do different things, when one raises an error, and when one dies
unwatched             a context, inside a watch, in which one rank may run ops alone
check_local_tensors   finds local tensors that are not what from_local, local_map or a style assumes
"""

from ..sharding.runtime import active_runtime
from .budget import budget
from .comm_mode import CommDebugMode
from .drawing import Drawing, load_ipython_extension, show
from .explaining.explain import Explanation, explain
from .local_check import check_local_tensors
from .picture import draw, visualize_sharding
from .reporting.report import Report, report
from .trace import merge_traces, trace
from .watching import unwatched, watch, watch_from_environment

__all__ = [
    "CommDebugMode",
    "Drawing",
    "Explanation",
    "Report",
    "budget",
    "check_local_tensors",
    "draw",
    "explain",
    "load_ipython_extension",
    "merge_traces",
    "report",
    "show",
    "trace",
    "unwatched",
    "visualize_sharding",
    "watch",
]


def _clear_sharding_prop_cache() -> None:
    """Clear the caches of the active world, by the name that programs written for PyTorch call."""
    active_runtime().clear_caches()


watch_from_environment()
