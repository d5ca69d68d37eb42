"""Adding an op as CONTRIBUTING.md describes it: the record in its code block serves the op, with every sharding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@torch.library.custom_op("shardwise_tests::alternate", mutates_args=())
def alternate(self: Tensor, dim: int) -> Tensor:
    signs = 1.0 - 2.0 * (torch.arange(self.shape[dim]) % 2)
    shape = [1] * self.dim()
    shape[dim] = -1
    return self * signs.view(shape)
