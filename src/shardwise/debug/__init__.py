"""Inspect distributed tensors and the communication of programs.

visualize_sharding    prints which ranks hold which shards of a tensor
draw                  returns the same picture as a string
CommDebugMode         counts and prints the communication in a block, module by module
"""

from .comm_mode import CommDebugMode
from .picture import draw, visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding", "draw"]
