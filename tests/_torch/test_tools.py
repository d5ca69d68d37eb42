"""The profiler and DebugMode say when they begin and end, and take what they are shown."""

import pytest
import torch
from torch.utils._debug_mode import DebugMode

from shardwise._torch import tools


@pytest.fixture
def calls(monkeypatch):
    for name in ("_run_on_profiler_start", "_run_on_profiler_stop"):
        monkeypatch.setattr(torch.autograd.profiler, name, getattr(torch.autograd.profiler, name))
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(DebugMode, name, getattr(DebugMode, name))
    return []


def test_profilers_begin_and_end(calls) -> None:
    tools.call_while_profiling(lambda: calls.append("begin"), lambda: calls.append("end"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert calls == ["begin"]
        with tools.record_function("a name"):
            torch.ones(2)
    assert calls == ["begin", "end"]
    assert "a name" in {event.name for event in profiler.events()}


def test_names_are_shown_while_a_profiler_is_active() -> None:
    with tools.shown_in_profile("not {}", "shown") as nothing:
        assert nothing is None
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile as profiler, tools.shown_in_profile("{} gradients", 3):
        torch.ones(2)
    assert "3 gradients" in {event.name for event in profiler.events()}


def test_debug_modes_begin_and_end_and_show(calls) -> None:
    tools.call_while_debugging(lambda mode: calls.append(mode), lambda mode: calls.append(mode))
    mode = DebugMode()
    with mode:
        assert calls == [mode]
        with tools.shows_redistribution(mode, torch.ones(2), None, None, "S(0)->R"):
            torch.ones(3)
    assert calls == [mode, mode]
    text = mode.debug_string()
    assert "redistribute_input(t: f32[2], trace: S(0)->R)" in text


def test_an_op_is_shown_with_the_ops_inside() -> None:
    mode = DebugMode()
    with tools.shows_op(mode, torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}):
        torch.ones(2).exp()
    lines = mode.debug_string().splitlines()
    assert lines[0].strip().startswith("aten::mm(t: f32[2, 2], t: f32[2, 2])")
    assert any("aten::exp" in line for line in lines)
