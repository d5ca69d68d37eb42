"""Every autograd node gets a note when it is made."""

import sys

import torch

from shardwise._torch.backward_pass import current_node
from shardwise._torch.node_notes import note_of, noting_nodes, recomputes, runs_backward


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_ops_functions_writes_to_views_and_leaves() -> None:
    notes = iter(range(100))
    x = torch.randn(4, requires_grad=True)
    with noting_nodes(lambda: f"note {next(notes)}"):
        y = x * 1
        z = Doubled.apply(y)
        w = z.clone()
        w[:2].mul_(3)
    nodes = [y.grad_fn, z.grad_fn, w.grad_fn, y.grad_fn.next_functions[0][0]]
    found = [note_of(node) for node in nodes]
    assert all(note is not None and note.startswith("note ") for note in found)
    assert len(set(found)) == 4
    assert note_of((x * 1).grad_fn) is None
    assert note_of(None) is None


def test_it_leaves_anomaly_mode_as_it_was() -> None:
    before = torch.fx.traceback.format_stack
    for enabled, checks in ((False, True), (True, True), (True, False)):
        with torch.autograd.set_detect_anomaly(enabled, check_nan=checks):
            with noting_nodes(lambda: ""):
                assert torch.is_anomaly_enabled()
                assert torch.is_anomaly_check_nan_enabled() == (enabled and checks)
            assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (enabled, checks)
    assert torch.fx.traceback.format_stack is before


def test_frames_of_the_engine_and_of_checkpoint() -> None:
    seen = []

    def hook(grad):
        frame = sys._getframe()
        while frame is not None:
            seen.append((runs_backward(frame), recomputes(frame)))
            frame = frame.f_back
        assert current_node() is not None

    x = torch.randn(4, requires_grad=True)
    y = x * 1
    y.register_hook(hook)
    y.sum().backward()
    assert any(engine for engine, _ in seen)
    assert not any(recomputed for _, recomputed in seen)
    seen.clear()
    x.grad = None

    def function(value):
        frame = sys._getframe()
        while frame is not None:
            seen.append((runs_backward(frame), recomputes(frame)))
            frame = frame.f_back
        return value.sin().cos()

    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert (True, False) in seen
    assert (False, True) in seen
