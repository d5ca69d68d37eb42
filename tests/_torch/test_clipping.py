"""clipping: the total norm is seen before gradients are clipped by it."""

import pytest
import torch
from torch import nn

from shardwise._torch.clipping import watching_clipping


def clip_in_one(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.5)


def clip_by_hand(parameters):
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)


@pytest.mark.parametrize("clip", [clip_in_one, clip_by_hand])
def test_the_norm_is_seen_before_it_is_used(clip):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    seen = []
    with watching_clipping(lambda norm: seen.append((norm.item(), parameter.grad.norm().item()))):
        clip([parameter])
    assert seen == [(5.0, 5.0)]
    torch.testing.assert_close(parameter.grad.norm(), torch.tensor(0.5))
    clip([parameter])
    assert len(seen) == 1
