"""Erase: record a step, and replay its local ops and collectives.

erased         `erase`, and the object it returns: looks up the recording of a call, or makes it
record         one call, recorded: graph, inputs, outputs, gradients, state
recorder       the dispatch mode that records ops
optimizers     optimizer steps as calls on local shards
random_states  generators that are set back, as activation checkpointing does
guards         when a recording may be replayed; `quick_check` is all guards as one function
passes/        what is removed, moved and joined
effects        what ops read and write
callees        the fastest way to call each op
program        from a graph to a Python function
stages         a graph as CUDA graphs or compiled functions
replay         a recording that is ready to run
"""

from .erased import Erased, erase

__all__ = ["Erased", "erase"]
