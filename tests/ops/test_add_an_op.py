"""Adding an op as CONTRIBUTING.md describes it: the record in its code block serves the op, and its test passes."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.ops.registry import registry, resolve

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python no-run\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
RECORD, TEST = (textwrap.dedent(block) for block in BLOCKS)
FILES = {"src/shardwise/ops/alternate.py": RECORD, "tests/ops/test_alternate.py": TEST}


@torch.library.custom_op("shardwise_tests::alternate", mutates_args=())
def alternate(self: Tensor, dim: int) -> Tensor:
    signs = 1.0 - 2.0 * (torch.arange(self.shape[dim]) % 2)
    shape = [1] * self.dim()
    shape[dim] = -1
    return self * signs.view(shape)


@alternate.register_fake
def _(self: Tensor, dim: int) -> Tensor:
    return torch.empty_like(self)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim = inputs[1]


alternate.register_autograd(lambda ctx, grad: (alternate(grad, ctx.dim), None), setup_context=_remember)


def run(source: str, name: str) -> dict[str, Any]:
    """Run a code block as the file with this name."""
    made = {"__name__": name, "__package__": name.rpartition(".")[0]}
    exec(compile(source, "CONTRIBUTING.md", "exec"), made)
    return made


def test_the_record_on_the_page_serves_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "alternate", alternate, raising=False)
    with registry.restored():
        run(RECORD.replace("aten::", "shardwise_tests::"), "shardwise.ops.alternate")
        assert resolve(torch.ops.shardwise_tests.alternate.default).op.file == "ops/alternate.py"
        tests = [value for name, value in run(TEST, "tests.ops.test_alternate").items() if name.startswith("test_")]
        check_it: Callable[[int], None]
        (check_it,) = tests
        for dim in (0, 1):
            check_it(dim)


@pytest.mark.parametrize("path", FILES)
def test_lint_passes_on_the_page(path: str) -> None:
    pytest.importorskip("ruff")
    for options in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *options, "--no-cache", "--stdin-filename", str(ROOT / path), "-"]
        done = subprocess.run(command, input=FILES[path], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
