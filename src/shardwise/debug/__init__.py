"""Inspect distributed tensors and the communication of programs.

visualize_sharding    prints which ranks hold which shards of a tensor
draw                  returns the same picture as a string
CommDebugMode         counts and prints the communication in a block, module by module
explain               tells why a block communicates: lines, modules, reasons, prices, alternatives, edits; as text,
                      as JSON, as a trace. What it holds is described in `explaining/records.py`
check_local_tensors   finds local tensors that are not what from_local, local_map or a style takes them for
"""

from ..sharding.runtime import active_runtime
from .comm_mode import CommDebugMode
from .explaining.explain import Explanation, explain
from .local_check import check_local_tensors
from .picture import draw, visualize_sharding

__all__ = ["CommDebugMode", "Explanation", "explain", "check_local_tensors", "visualize_sharding", "draw"]


def _clear_sharding_prop_cache() -> None:
    """Forget all plans of ops: the name that programs for PyTorch call between worlds."""
    active_runtime().clear_caches()
