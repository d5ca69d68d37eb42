"""Functions around the calls of modules run in the thread that asked for them, and in no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.nn.module_calls import around_module_calls


def noting(calls: list[str], name: str = "") -> Callable[..., object]:
    def note(call: Callable[..., object], module: nn.Module, *args: object, **kwargs: object) -> object:
        calls.append(name + type(module).__name__)
        return call(module, *args, **kwargs)

    return note


def test_nested_wrappers_run_last_entered_first() -> None:
    original, calls, model = nn.Module.__call__, list[str](), nn.Sequential(nn.ReLU())
    with around_module_calls(noting(calls, "outer ")):
        with around_module_calls(noting(calls, "inner ")):
            model(torch.ones(2))
        model(torch.ones(2))
    model(torch.ones(2))
    assert calls[:4] == ["inner Sequential", "outer Sequential", "inner ReLU", "outer ReLU"]
    assert calls[4:] == ["outer Sequential", "outer ReLU"]
    assert nn.Module.__call__ is original


def test_calls_in_a_backward_pass_are_wrapped() -> None:
    calls, model = list[str](), nn.Sequential(nn.Linear(2, 2))
    with around_module_calls(noting(calls)):
        checkpoint(model, torch.ones(2), use_reentrant=False).sum().backward()
    assert calls == ["Sequential", "Linear"] * 2


@pytest.mark.parametrize("first_out", [0, 1])
def test_threads_do_not_see_the_wrappers_of_others(first_out: int) -> None:
    """In whichever order they leave, the method of `nn.Module` is put back."""
    original, calls = nn.Module.__call__, [list[str](), list[str]()]
    entered, left, model = threading.Barrier(3), threading.Event(), nn.Sequential(nn.ReLU())

    def run(index: int) -> None:
        with around_module_calls(noting(calls[index])):
            entered.wait(30)
            model(torch.ones(2))
            if index != first_out:
                assert left.wait(30)
                model(torch.ones(2))

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run, index) for index in range(2)]
        entered.wait(30)
        model(torch.ones(2))
        running[first_out].result(30)
        left.set()
        running[1 - first_out].result(30)
    assert calls[first_out] == ["Sequential", "ReLU"]
    assert calls[1 - first_out] == ["Sequential", "ReLU"] * 2
    assert nn.Module.__call__ is original
