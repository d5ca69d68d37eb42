"""A drawn table of how the parameters and buffers of a module are sharded.

>>> print(draw_module(model))
┌──────────────────────┬──────────────────────────────┬──────────┬──────────┐
│ parameter            │ sharding on mesh(dp=2, tp=4) │ global   │ per rank │
├──────────────────────┼──────────────────────────────┼──────────┼──────────┤
│ layers.*.up.weight   │ 2 x f32[64@tp, 16]           │    8 KiB │    2 KiB │
│ layers.*.down.weight │ 2 x f32[16, 64@tp]           │    8 KiB │    2 KiB │
│ total                │                              │   16 KiB │    4 KiB │
└──────────────────────┴──────────────────────────────┴──────────┴──────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from ..comm.plan import bytes_text
from ..tensor.dtensor import DTensor
from .table import boxed


class HoldingRow(NamedTuple):
    """Parameters or buffers that share a row: their name, how many, how they are sharded, bytes in all and per rank."""

    name: str
    number: int
    tensor: Tensor
    """The first of them."""
    total: int
    held: int

    def sharding(self, *, with_mesh: bool = False) -> str:
        """Return how they are sharded, as text."""
        text = _sharding_text(self.tensor, with_mesh)
        return f"{self.number} x {text}" if self.number > 1 else text


def draw_module(module: nn.Module) -> str:
    """Return a table of the parameters and buffers of a module: sharding, global bytes, and bytes per rank.

    Where shards differ in size, the bytes per rank are those of the largest. Parameters of the same name and sharding
    in numbered modules share a row.
    """
    rows = module_rows(module)
    meshes = {repr(row.tensor.spec.mesh_info) for row in rows if isinstance(row.tensor, DTensor)}
    cells = [
        [row.name, row.sharding(with_mesh=len(meshes) > 1), f"{bytes_text(row.total):>8}", f"{bytes_text(row.held):>8}"]
        for row in rows
    ]
    sums = bytes_text(sum(row.total for row in rows)), bytes_text(sum(row.held for row in rows))
    cells.append(["total", "", *(f"{text:>8}" for text in sums)])
    sharding = f"sharding on {meshes.pop()}" if len(meshes) == 1 else "sharding"
    return boxed(["parameter", sharding, "global", "per rank"], cells)


def module_rows(module: nn.Module) -> list[HoldingRow]:
    """Return the rows of the table of a module."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shardings = {name: _sharding_text(tensor, with_mesh=True) for name, tensor in state.items()}
    rows: dict[tuple[str, str], HoldingRow] = {}
    for name, shared in _row_names(shardings).items():
        key, tensor = (shared, shardings[name]), state[name]
        before = rows.get(key, HoldingRow(shared, 0, tensor, 0, 0))
        total, held = before.total + tensor.nbytes, before.held + held_bytes(tensor)
        rows[key] = before._replace(number=before.number + 1, total=total, held=held)
    return list(rows.values())


def _row_names(shardings: Mapping[str, str]) -> dict[str, str]:
    """Return the row of each name: with stars for numbers if all names of that form are sharded alike."""
    alike: dict[str, list[str]] = {}
    for name in shardings:
        shared = ".".join("*" if part.isdigit() else part for part in name.split("."))
        alike.setdefault(shared, []).append(name)
    found = {}
    for shared, names in alike.items():
        together = len(names) > 1 and len({shardings[name] for name in names}) == 1
        found.update({name: shared if together else name for name in names})
    return {name: found[name] for name in shardings}


def _sharding_text(tensor: Tensor, with_mesh: bool) -> str:
    if not isinstance(tensor, DTensor):
        return f"plain {list(tensor.shape)}"
    return f"{tensor.spec!r} on {tensor.spec.mesh_info!r}" if with_mesh else repr(tensor.spec)


def held_bytes(tensor: Tensor) -> int:
    """Return the most bytes that one rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.nbytes
    return tensor.spec.layout.max_local_numel() * tensor.dtype.itemsize
