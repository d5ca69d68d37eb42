"""Fake tensors are known by their class, and their mode by its place on the stack of modes."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise._torch.fake_tensors import has_readable_values, in_fake_mode, is_fake


def test_the_mode_and_its_tensors() -> None:
    assert not in_fake_mode()
    with FakeTensorMode():
        assert in_fake_mode()
        made = torch.ones(2)
    assert not in_fake_mode()
    assert is_fake(made)
    assert not is_fake(torch.ones(2))


def test_which_values_can_be_read() -> None:
    with FakeTensorMode():
        made = torch.ones(2)
    assert made.device.type == "cpu"
    assert not has_readable_values(made)
    assert not has_readable_values(torch.ones(2, device="meta"))
    assert has_readable_values(torch.ones(2))
