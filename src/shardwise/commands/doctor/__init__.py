"""`shardwise doctor`: what this machine has, whether a mesh works on it, and what communication costs.

machine    versions, backends and devices
ranks      the processes that the tests run on: those of torchrun, or some that are started here
self_test  collectives, redistributions, a product with gradients and random numbers, compared with one device
measure    latency and bandwidth of each axis
"""

from .command import COMMAND

__all__ = ["COMMAND"]
