"""Testing distributed code: tensors with known values, a checker, and hypothesis strategies.

`make_dtensor` makes a tensor with any placements by index arithmetic, and `assemble` returns its global value from the
shards. Neither communicates, so a test that uses them shares no code with what it tests:

>>> with shardwise.simulate(4):
...     mesh = init_device_mesh("cpu", (2, 2))
...     value = torch.arange(15.0).view(5, 3)
...     x = make_dtensor(value, mesh, [Partial("max"), Shard(0)], seed=0)
...     torch.equal(assemble(x.redistribute(placements=[Shard(1), Replicate()])), value)
True

`check` compares a function on distributed tensors with the one-device answer. `discover` finds the rule of an op by
trying it on slices of sample inputs. `shardwise.testing.strategies` draws meshes, shapes, dtypes, placements and specs;
it imports hypothesis on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from .checker import Checked, Mismatch, check
from .discovery import Discovered, discover
from .partial_operands import operands
from .values import assemble, make_dtensor

__all__ = ["assemble", "make_dtensor", "operands", "check", "Checked", "Mismatch", "discover", "Discovered"]


def __getattr__(name: str) -> ModuleType:
    if name == "strategies":
        return importlib.import_module(f"{__name__}.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
