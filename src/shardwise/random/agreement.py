"""A check that the generators of all ranks are in the same state: otherwise replicas would hold different numbers.

The ranks of a mesh compare the states of their generators, one small collective for each mesh axis, at the first draw
from a device's default generator, at the first draw from a generator of the user's, and again after `manual_seed`. They
do not compare at every draw, which would take a collective in every call.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._torch.collectives import all_gather, wait
from ..comm.groups import adopt
from ..errors import WorldError
from ..sharding.mesh import MeshInfo
from ..sharding.runtime import WorldState
from ..world.generators import generator_for

_CHECKED: WorldState[dict[MeshInfo, set[str]]] = WorldState(dict)
"""Which kinds of generators the ranks of each mesh have compared."""


class _Check:
    """Whether generators are compared at all. One switch for the process: all its threads run the same rank."""

    enabled = True


def set_generator_check(enabled: bool) -> None:
    """Turn on or off that ranks compare their generators at the first draw on a mesh. Call it on all ranks alike."""
    _Check.enabled = enabled


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed the default generator of the mesh's device; call it with the same seed on all ranks of the mesh.

    `torch.manual_seed` does the same, but the ranks do not compare their generators again at the next draw.

    >>> shardwise.random.manual_seed(0, mesh)
    """
    mesh_info = adopt(device_mesh)
    _default_generator(mesh_info).manual_seed(seed)
    _CHECKED.of(mesh_info.runtime).pop(mesh_info, None)


def check_first_use(mesh_info: MeshInfo, generator: torch.Generator) -> None:
    """Compare the state of a generator on all ranks of the mesh, unless one of its kind was compared before."""
    if mesh_info.simulated or not _Check.enabled:
        return
    kinds = _CHECKED.of(mesh_info.runtime).setdefault(mesh_info, set())
    kind = "the generator that was passed"
    if _is_default(generator):
        kind = f"the default {generator.device.type} generator"
    if kind not in kinds:
        kinds.add(kind)
        _compare(mesh_info, generator, kind)


def _compare(mesh_info: MeshInfo, generator: torch.Generator, kind: str) -> None:
    digest = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
    device = "cpu" if mesh_info.device_type in ("cpu", "meta") else mesh_info.device_type
    states = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
    # Gathered axis by axis, the last one first, so that the result is in the order of the mesh's ranks.
    for axis in reversed(range(len(mesh_info.sizes))):
        if mesh_info.sizes[axis] > 1:
            states = wait(all_gather(states, mesh_info.sizes[axis], mesh_info.groups[(axis,)]))
    found = states.tolist()
    majority, count = Counter(found).most_common(1)[0]
    if count == len(found):
        return
    ranks = mesh_info.mesh.mesh.flatten().tolist()
    others = [str(rank) for rank, state in zip(ranks, found, strict=True) if state != majority]
    _CHECKED.of(mesh_info.runtime).pop(mesh_info, None)
    raise WorldError(
        f"{kind} is in another state on rank(s) {', '.join(others)} than on the other ranks of {mesh_info!r}",
        "seed all ranks alike with torch.manual_seed(seed) or shardwise.random.manual_seed(seed, mesh), and draw for "
        "one rank alone from a generator of its own; shardwise.random.set_generator_check(False) turns this check off",
    )


def _default_generator(mesh_info: MeshInfo) -> torch.Generator:
    device_type = mesh_info.device_type
    return generator_for((), torch.device("cpu" if device_type == "meta" else device_type))


def _is_default(generator: torch.Generator) -> bool:
    return generator is generator_for((), generator.device)
