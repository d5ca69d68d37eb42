"""Metadata of the tensors between stages: sent once, and forgotten by both sides at the same time."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from shardwise.pipeline import transfer
from shardwise.pipeline.schedule import Action
from shardwise.pipeline.transfer import Courier


class Wire(Courier):
    """Sends into a queue, and receives from it, in the place of a process group."""

    def __init__(self, messages: deque[Tensor]) -> None:
        self.messages, self.device, self._known = messages, torch.device("cpu"), {}
        self.mesh_of = lambda stage: None  # type: ignore[assignment,return-value]

    def _send_one(self, to: Action, dense: Tensor, index: int) -> None:
        self.messages.append(dense)

    def _receive_one(self, to: Action, dense: Tensor, came_from: int, index: int) -> Any:
        dense.copy_(self.messages.popleft())
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_metadata_is_bounded_and_forgotten_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_KNOWN_BYTES", 8 * transfer._ENTRY_BYTES)
    messages: deque[Tensor] = deque()
    sender, middle, last = (Wire(messages) for _ in range(3))  # `middle` receives, and sends other tensors
    sizes = [1, 2, 3, 1, *range(4, 30), 1, 28, 29, 2, 3]
    metadata = 0
    for number, size in enumerate(sizes):
        value = torch.full((size,), float(number))
        for to, one, other in ((Action(False, 1, number), sender, middle), (Action(False, 2, number), middle, last)):
            one.send(to, value, size)
            metadata += len(messages) == 3
            assert torch.equal(other.receive(to, size), value)
            assert not messages
    assert metadata < 2 * len(sizes)
    assert max(len(cache) for wire in (sender, middle, last) for cache in wire._known.values()) <= 10
