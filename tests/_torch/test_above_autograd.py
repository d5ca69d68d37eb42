"""Kernels above autograd, on a tensor subclass of its own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._torch import above_autograd
from shardwise._torch.above_autograd import Overrides, call_original, call_with_autograd

_library = torch.library.Library("shardwise_test_above", "DEF")
_library.define("composite(Tensor x) -> Tensor")
_library.impl("composite", lambda x: x.sin() * 2, "CompositeImplicitAutograd")
COMPOSITE = torch.ops.shardwise_test_above.composite.default
COUNTED = torch.ops.aten.digamma.default  # an op with a derivative that nothing here overrides


class Wrapped(Tensor):
    """A tensor that writes down the ops that reach it."""

    calls: list[str]
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, calls: list[str]) -> "Wrapped":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.calls = inner, calls
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = next(value.calls for value in args if isinstance(value, Wrapped))
        calls.append(func.overloadpacket.__name__)
        inner = [value.inner if isinstance(value, Wrapped) else value for value in args]
        return cls(func(*inner, **(kwargs or {})), calls)


class Mode(TorchDispatchMode):
    """Writes down the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


SEEN: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def overridden() -> Iterator[None]:
    def composite(keys: Any, *args: Any) -> Any:
        SEEN.append("composite")
        return call_original(COMPOSITE, keys, *args)

    def counted(keys: Any, *args: Any) -> Any:
        SEEN.append("counted")
        return call_with_autograd(COUNTED, keys, *args)

    overrides = Overrides()
    overrides.add(COMPOSITE, composite)
    overrides.add(COUNTED, counted)
    assert len(overrides) == 2
    yield
    overrides.remove()


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def test_plain_tensors_pay_nothing() -> None:
    COMPOSITE(torch.ones(2))
    COUNTED(torch.ones(2))
    assert SEEN == []


def test_a_composite_op_is_decomposed_by_its_original() -> None:
    x = Wrapped(torch.ones(2), []).requires_grad_()
    y = COMPOSITE(x)
    assert SEEN == ["composite"]
    assert x.calls == ["sin", "mul"]
    assert type(y.grad_fn).__name__ == "MulBackward0"


@pytest.mark.parametrize("needs_snapshot", sorted({True, above_autograd._NEEDS_SNAPSHOT}))
def test_an_op_with_a_derivative_is_recorded(needs_snapshot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.11 needs it, and as later ones do."""
    monkeypatch.setattr(above_autograd, "_NEEDS_SNAPSHOT", needs_snapshot)
    x = Wrapped(torch.ones(2), []).requires_grad_()
    y = COUNTED(x)
    assert SEEN == ["counted"]
    assert x.calls == ["digamma"]
    assert type(y.grad_fn).__name__ == "DigammaBackward0"
    torch.testing.assert_close(y.inner, torch.digamma(torch.ones(2)))


@pytest.mark.parametrize("op", [COMPOSITE, COUNTED], ids=str)
def test_in_inference_mode(op: Any) -> None:
    x = Wrapped(torch.ones(2), [])
    with torch.inference_mode():
        torch.testing.assert_close(op(x).inner, op(torch.ones(2)))
        made_inside = Wrapped(torch.ones(2), [])
        torch.testing.assert_close(op(made_inside).inner, op(torch.ones(2)))


@pytest.mark.parametrize(("op", "expected"), [(COMPOSITE, ["sin", "mul"]), (COUNTED, ["digamma"])], ids=str)
def test_modes_see_the_op(op: Any, expected: list[str]) -> None:
    x = Wrapped(torch.ones(2), [])
    with Mode() as mode:
        op(x)
    assert mode.calls[: len(expected)] == expected


def test_calls_nest() -> None:
    """The class may call the op again, on tensors of another; keys above autograd are switched off there."""
    x = Wrapped(Wrapped(torch.ones(2), []), []).requires_grad_()
    y = COUNTED(x)
    assert SEEN == ["counted"]
    assert x.inner.calls == ["digamma"]  # type: ignore[attr-defined]
    torch.testing.assert_close(y.inner.inner, torch.digamma(torch.ones(2)))


def test_errors_pass_through() -> None:
    class Failing(Wrapped):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise KeyError(func.overloadpacket.__name__)

    with pytest.raises(KeyError, match="digamma"):
        COUNTED(Failing(torch.ones(2), []))
    assert COUNTED(Wrapped(torch.ones(2), [])).shape == (2,)


def test_removed_kernels_are_not_called_and_may_be_added_again() -> None:
    lgamma, overrides = torch.ops.aten.lgamma.default, Overrides()
    for _ in range(2):
        overrides.add(lgamma, lambda keys, x: SEEN.append("lgamma") or call_with_autograd(lgamma, keys, x))
        assert lgamma(Wrapped(torch.ones(2), [])).shape == (2,)
        overrides.remove()
        assert not len(overrides)
        x = Wrapped(torch.ones(2), []).requires_grad_()
        y = lgamma(x)
        assert x.calls == ["lgamma"]
        assert type(y.grad_fn).__name__ == "LgammaBackward0"
    assert SEEN == ["lgamma", "lgamma"]
