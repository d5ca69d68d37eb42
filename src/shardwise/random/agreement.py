"""Ranks whose generators have parted would fill replicas with different numbers: found at first use, and named.

At the first draw on a mesh from a device's default generator, and the first from one of the user's, the ranks compare
the states of their generators: one small collective for each axis. After `manual_seed` they do so again. Generators are
not watched in between; that would take a collective in every call.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._torch.collectives import all_gather, wait
from ..comm.groups import adopt
from ..errors import WorldError
from ..sharding.mesh import MeshInfo
from ..world.mapping import generator_for

_checked: WeakKeyDictionary[MeshInfo, set[str]] = WeakKeyDictionary()


class _Switch:
    on = True


def set_generator_check(enabled: bool) -> None:
    """Whether ranks compare their generators when a mesh first draws; the same on all ranks."""
    _Switch.on = enabled


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed the default generator of the mesh's device, with the same seed on all its ranks.

    `torch.manual_seed` does as well. This also has the ranks compare their generators again when they next draw.

    >>> shardwise.random.manual_seed(0, mesh)
    """
    mesh_info = adopt(device_mesh)
    _default(mesh_info).manual_seed(seed)
    _checked.pop(mesh_info, None)


def check_first_use(mesh_info: MeshInfo, generator: torch.Generator) -> None:
    """Compare this generator's state on all ranks of the mesh, unless this was done before."""
    if mesh_info.simulated or not _Switch.on:
        return
    seen = _checked.get(mesh_info)
    if seen is None:
        seen = _checked[mesh_info] = set()
    name = (
        f"the default {generator.device.type} generator" if _is_default(generator) else "the generator that was passed"
    )
    if name not in seen:
        seen.add(name)
        _compare(mesh_info, generator, name)


def _compare(mesh_info: MeshInfo, generator: torch.Generator, name: str) -> None:
    digest = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
    device = "cpu" if mesh_info.device_type in ("cpu", "meta") else mesh_info.device_type
    states = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
    # Axis by axis, the last one first: then they lie in the order of the mesh.
    for axis in reversed(range(len(mesh_info.sizes))):
        if mesh_info.sizes[axis] > 1:
            states = wait(all_gather(states, mesh_info.sizes[axis], mesh_info.groups[(axis,)]))
    found = states.tolist()
    common, count = Counter(found).most_common(1)[0]
    if count == len(found):
        return
    ranks = mesh_info.mesh.mesh.flatten().tolist()
    parted = [str(rank) for rank, state in zip(ranks, found, strict=True) if state != common]
    _checked.pop(mesh_info, None)
    raise WorldError(
        f"{name} is in another state on rank(s) {', '.join(parted)} than on the other ranks of {mesh_info!r}",
        "seed all ranks alike with torch.manual_seed(seed) or shardwise.random.manual_seed(seed, mesh), and draw for "
        "one rank alone from a generator of its own; shardwise.random.set_generator_check(False) turns this check off",
    )


def _default(mesh_info: MeshInfo) -> torch.Generator:
    if mesh_info.device_type in ("cpu", "meta"):
        return torch.default_generator
    return generator_for((), torch.device(mesh_info.device_type))


def _is_default(generator: torch.Generator) -> bool:
    if generator.device.type == "cpu":
        return generator is torch.default_generator
    return generator is generator_for((), generator.device)
