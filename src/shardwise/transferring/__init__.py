"""Moving a model's state from one mesh to another, such as from a trainer's ranks to a generator's.

api             `transfer`, and `plan_transfer`: what it would do, as a value that prints
naming          which tensors become which: renamed, left out, or put together
planning        routes, and buckets of bounded size
running         the buckets, one after the other
describing      what ranks without the state dict have to know of it
"""

from .api import plan_transfer, transfer
from .naming import Part
from .planning import TransferPlan

__all__ = ["transfer", "plan_transfer", "Part", "TransferPlan"]
