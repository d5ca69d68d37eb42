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

from torch import Tensor, nn

from ..comm.plan import bytes_text
from ..tensor.dtensor import DTensor
from .table import boxed


def draw_module(module: nn.Module) -> str:
    """Return a table of the parameters and buffers of a module: sharding, global bytes, and bytes per rank.

    Where shards differ in size, the bytes per rank are those of the largest. Parameters of the same name and sharding
    in numbered modules share a row.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    meshes = {repr(tensor.spec.mesh_info) for tensor in state.values() if isinstance(tensor, DTensor)}
    shardings = {name: _sharding_text(tensor, with_mesh=len(meshes) > 1) for name, tensor in state.items()}
    rows: dict[tuple[str, str], list[int]] = {}
    for name, shared in _row_names(shardings).items():
        tensor = state[name]
        row = rows.setdefault((shared, shardings[name]), [0, 0, 0])
        row[:] = [row[0] + 1, row[1] + tensor.nbytes, row[2] + held_bytes(tensor)]
    cells = [
        [name, f"{count} x {text}" if count > 1 else text, f"{bytes_text(total):>8}", f"{bytes_text(held):>8}"]
        for (name, text), (count, total, held) in rows.items()
    ]
    sums = [bytes_text(sum(row[column] for row in rows.values())) for column in (1, 2)]
    cells.append(["total", "", *(f"{text:>8}" for text in sums)])
    sharding = f"sharding on {meshes.pop()}" if len(meshes) == 1 else "sharding"
    return boxed(["parameter", sharding, "global", "per rank"], cells)


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
