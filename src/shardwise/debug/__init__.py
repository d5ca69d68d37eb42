"""Looking at distributed tensors and programs.

visualize_sharding    prints who holds what of a tensor
draw                  the same picture as a string
CommDebugMode         counts and draws the communication in a block, module by module
"""

from .comm_mode import CommDebugMode
from .picture import draw, visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding", "draw"]
