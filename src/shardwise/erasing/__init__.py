"""Erase: record a step, and replay the local code that it comes down to.

erased         `erase`, and the object it returns: looks up the recording of a call, or makes it
record         one call, recorded: graph, inputs, outputs, gradients, state
recorder       the dispatch mode that writes down ops
optimizers     optimizer steps as calls on local shards
random_states  generators that are set back, as activation checkpointing does
guards         when a recording may be replayed
passes/        what is removed, moved and joined
effects        what ops read and write
program        from a graph to a Python function
replay         a recording that is ready to run
"""

from .erased import Erased, erase

__all__ = ["Erased", "erase"]
