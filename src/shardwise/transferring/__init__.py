"""Move a model's state from one mesh to another, such as from a trainer's ranks to a generator's.

api             `transfer`, and `plan_transfer`, which returns its plan
naming          names in the result: tensors are renamed, left out, or concatenated
planning        routes, and buckets of bounded size
running         sends the buckets, with two collectives in flight
describing      names, shapes and placements for ranks without the state dict
"""

from .api import plan_transfer, transfer
from .naming import Part
from .planning import TransferPlan

__all__ = ["transfer", "plan_transfer", "Part", "TransferPlan"]
