"""A distributed module is exported, saved, loaded and run; `make_fx` records ops on distributed tensors."""

from __future__ import annotations

import io

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import DTensor
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
