"""Looking at distributed tensors.

visualize_sharding    prints who holds what of a tensor
draw                  the same picture as a string
"""

from .picture import draw, visualize_sharding

__all__ = ["visualize_sharding", "draw"]
