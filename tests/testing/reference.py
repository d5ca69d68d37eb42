"""The coverage script on torch.distributed.tensor: the same samples, placements and comparisons.

    python -m tests.testing.reference [--only NAME] [--write]

It runs on four gloo processes. An entry that hangs or crashes counts as an error.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as TorchPartial

from shardwise.sharding.placement import Partial, Placement
from shardwise.sharding.placement import Shard as OurShard
from shardwise.testing import make_dtensor
from shardwise.testing.coverage.__main__ import main
from shardwise.testing.coverage.sides import Processes


class Reference(Processes):
    """PyTorch's distributed tensors, with the same parts on each rank as ours have."""

    def make(self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int) -> Tensor:
        """The distributed tensor of this value."""
        local = make_dtensor(value, mesh, placements, seed=seed).to_local()
        shape, stride = value.shape, torch.empty(value.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [_theirs(p) for p in placements], shape=shape, stride=stride)

    def whole(self, found: Any) -> Tensor:
        """The value of a result."""
        if not isinstance(found, DTensor):
            raise TypeError(f"the result is a {type(found).__name__}, not a DTensor")
        with torch.no_grad():
            return found.full_tensor()


def _theirs(placement: Placement) -> Any:
    if isinstance(placement, OurShard):
        return Shard(placement.dim)
    return TorchPartial(placement.reduce_op) if isinstance(placement, Partial) else Replicate()


if __name__ == "__main__":
    sys.exit(main(reference=Reference))
