"""What shardwise relies on about the results of functional collectives."""

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from shardwise._torch.async_tensors import wait_for_data


def test_a_plain_tensor_is_returned_unchanged() -> None:
    x = torch.ones(2)
    assert wait_for_data(x) is x


def test_a_pending_tensor_becomes_a_plain_one() -> None:
    x = torch.ones(2)
    found = wait_for_data(AsyncCollectiveTensor(x))
    assert type(found) is torch.Tensor
    assert torch.equal(found, x)
