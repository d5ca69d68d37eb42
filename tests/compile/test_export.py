"""A distributed module is exported, saved, loaded and run; `make_fx` records ops on distributed tensors."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import DTensor, Replicate
from tests.compile.cases import CASES, Make
from tests.worlds import lone_rank

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    with lone_rank() as mesh:
        module, (x,) = CASES["sharded_module"](Make(mesh))
        assert isinstance(module, torch.nn.Module)
        x = x.detach()
        exported = torch.export.export(module, (x,), strict=strict)
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        expected = module(x)
        for program in (exported, torch.export.load(file)):
            result = program.module()(x)
            assert isinstance(result, DTensor)
            assert result.spec is expected.spec
            torch.testing.assert_close(result.to_local(), expected.to_local())
    torch.compiler.reset()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    with lone_rank() as mesh:
        function, arguments = CASES["products"](Make(mesh))
        arguments = [value.detach() for value in arguments]
        graph = make_fx(function, tracing_mode=mode)(*arguments)
        others = [value * 2 for value in arguments]
        result, expected = graph(*others), function(*others)
        assert result.spec is expected.spec  # type: ignore[attr-defined]
        torch.testing.assert_close(result.to_local(), expected.to_local())  # type: ignore[attr-defined]


def moved(x: DTensor, y: DTensor) -> Tensor:
    return (x.redistribute(placements=[Replicate()]) * 2 + y.redistribute(placements=[Replicate()])).relu()


def local(x: DTensor, y: DTensor) -> Tensor:
    return x.to_local() * 2 + (x * y).to_local()  # type: ignore[attr-defined]


def gathered(x: DTensor, y: DTensor) -> Tensor:
    return (x + y).full_tensor().sum(1)  # type: ignore[attr-defined]


def gradient(x: DTensor, y: DTensor) -> Tensor:
    product = x.redistribute(placements=[Replicate()]) * y.redistribute(placements=[Replicate()])
    return torch.autograd.grad(product.sum(), x)[0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("function", [moved, local, gathered, gradient], ids=lambda function: function.__name__)
def test_make_fx_of_conversions(function: Callable[..., Tensor], mode: str) -> None:
    with lone_rank() as mesh:
        make = Make(mesh)

        def arguments(size: int) -> list[Tensor]:
            made = [make(size, 4) for _ in range(2)]
            return made if function is gradient else [value.detach() for value in made]

        graph = make_fx(function, tracing_mode=mode)(*arguments(8))
        for size in (8, 16) if mode == "symbolic" else (8,):
            given = arguments(size)
            result, expected = graph(*given), function(*given)
            assert type(result) is type(expected)
            if isinstance(result, DTensor) and isinstance(expected, DTensor):
                assert result.spec is expected.spec
                result, expected = result.to_local(), expected.to_local()
            torch.testing.assert_close(result, expected)
