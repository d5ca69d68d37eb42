"""Adding an op as CONTRIBUTING.md describes it: the record in its code block serves the op, however it is sharded."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch
from torch import Tensor

from shardwise.ops.registry import registry, resolve
from shardwise.testing import check

BLOCK = re.search(r"```python no-run\n(.*?)```", (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(), re.S)


@torch.library.custom_op("shardwise_tests::alternate", mutates_args=())
def alternate(self: Tensor, dim: int) -> Tensor:
    signs = 1.0 - 2.0 * (torch.arange(self.shape[dim]) % 2)
    shape = [1] * self.dim()
    shape[dim] = -1
    return self * signs.view(shape)


@alternate.register_fake
def _(self: Tensor, dim: int) -> Tensor:
    return torch.empty_like(self)


def test_the_record_on_the_page_serves_the_op() -> None:
    assert BLOCK is not None
    source = textwrap.dedent(BLOCK[1]).replace("aten::", "shardwise_tests::")
    with registry.restored():
        exec(compile(source, "CONTRIBUTING.md", "exec"), {"__name__": "shardwise.ops.alternate"})
        assert resolve(torch.ops.shardwise_tests.alternate.default).op.file == "ops/alternate.py"
        for dim in (0, 1):
            check(lambda x, dim=dim: alternate(x, dim), torch.randn(5, 4), grad=False)
