"""PyTorch's functions in Python that make plain tensors, and wrappers that take their place."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise._torch.python_functions import Place, disguised, functions_that_make_tensors, holders


@pytest.mark.parametrize("place", functions_that_make_tensors(), ids=lambda place: f"{place.owner} {place.name}")
def test_they_are_where_they_are_looked_for(place: Place) -> None:
    assert callable(getattr(place.owner, place.name))


def test_a_wrapper_looks_like_the_original_to_the_script_compiler() -> None:
    original = inspect.unwrap(F.embedding_bag)
    calls: list[Any] = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    made = disguised(wrapper, original)
    assert inspect.signature(made) == inspect.signature(original)
    assert made.__globals__ is original.__globals__
    given = torch.tensor([[0, 1]]), torch.ones(3, 2)
    torch.testing.assert_close(made(*given), original(*given))
    assert len(calls) == 1


def test_holders_are_the_modules_that_have_a_function_by_any_name():
    found = holders(holders)
    names = {(place.owner.__name__, place.name) for place in found}  # type: ignore[attr-defined]
    assert ("shardwise._torch.python_functions", "holders") in names
    assert any(name == "holders" and owner.endswith("test_python_functions") for owner, name in names)
