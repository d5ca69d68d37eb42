"""The generators of all ranks must be in the same state: otherwise replicas would hold different numbers.

The ranks of a mesh compare the states of their generators, one small collective for each mesh axis, at the first draw
from a device's default generator, at the first draw from a generator of the user's, and again after `manual_seed`. They
do not compare at every draw, which would take a collective in every call.

Programs that never seed start with different states. As in PyTorch, the ranks then take the state of the first rank of
the mesh, with one warning. Where the program did choose the states, with `manual_seed` or `generator=`, it is an error.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.exchange import all_gather_ranks, broadcast_move
from ..comm.groups import adopt
from ..errors import WorldError
from ..sharding.mesh import MeshInfo
from ..sharding.runtime import WorldState
from ..world.generators import generator_for

_CHECKED: WorldState[dict[MeshInfo, set[str]]] = WorldState(dict)
"""Which kinds of generators the ranks of each mesh have compared."""
_SEEDED: WorldState[set[MeshInfo]] = WorldState(set)
"""The meshes whose default generator was seeded by `manual_seed`."""


class _Check:
    """Whether generators are compared at all, and whether a difference was warned of.

    Both apply to the process: all its threads run the same rank.
    """

    enabled = True
    warned = False


def set_generator_check(enabled: bool) -> None:
    """Turn the comparison of generators at the first draw on a mesh on or off. Call it on all ranks alike.

    >>> set_generator_check(False)
    >>> set_generator_check(True)                           # the default
    """
    _Check.enabled = enabled


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed the default generator of the mesh's device; call it with the same seed on all ranks of the mesh.

    `torch.manual_seed` does the same, but the ranks do not compare their generators again at the next draw.

    >>> shardwise.random.manual_seed(0, mesh)
    """
    mesh_info = adopt(device_mesh)
    _default_generator(mesh_info).manual_seed(seed)
    _SEEDED.of(mesh_info.runtime).add(mesh_info)
    _CHECKED.of(mesh_info.runtime).pop(mesh_info, None)


def check_first_use(mesh_info: MeshInfo, generator: torch.Generator) -> None:
    """Compare the state of a generator on all ranks of the mesh, unless one of its kind was compared before.

    A default generator that the program did not seed through the mesh takes the state of the mesh's first rank.
    """
    if mesh_info.simulated or mesh_info.outside or not _Check.enabled:
        return
    kinds = _CHECKED.of(mesh_info.runtime).setdefault(mesh_info, set())
    kind = "the generator that was passed"
    if _is_default(generator):
        kind = f"the default {generator.device.type} generator"
    if kind in kinds:
        return
    kinds.add(kind)
    others = _ranks_that_differ(mesh_info, generator)
    if not others:
        return
    problem = (
        f"{kind} is in another state on rank(s) {', '.join(map(str, others))} than on the other ranks of {mesh_info!r}"
    )
    if _is_default(generator) and mesh_info not in _SEEDED.of(mesh_info.runtime):
        _take_first_state(mesh_info, generator)
        if not _Check.warned:
            _Check.warned = True
            first = mesh_info.mesh.mesh.flatten()[0].item()
            warnings.warn(
                f"{problem}; all take the state of rank {first}. To choose the numbers, seed all ranks alike with "
                "torch.manual_seed(seed)",
                stacklevel=2,
            )
        return
    _CHECKED.of(mesh_info.runtime).pop(mesh_info, None)
    raise WorldError(
        problem,
        "seed all ranks alike with torch.manual_seed(seed) or shardwise.random.manual_seed(seed, mesh), and draw for "
        "one rank alone from a generator of its own; shardwise.random.set_generator_check(False) turns this check off",
    )


def _ranks_that_differ(mesh_info: MeshInfo, generator: torch.Generator) -> list[int]:
    """Return the ranks whose generator is in another state than the generators of most ranks."""
    digest = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
    number = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=_device(mesh_info))
    found = all_gather_ranks(number, mesh_info).flatten().tolist()
    majority, _ = Counter(found).most_common(1)[0]
    ranks = mesh_info.mesh.mesh.flatten().tolist()
    return [rank for rank, state in zip(ranks, found, strict=True) if state != majority]


def _take_first_state(mesh_info: MeshInfo, generator: torch.Generator) -> None:
    """Put the generators of all ranks into the state of the first rank's generator."""
    state = generator.get_state().to(_device(mesh_info))
    for axis, size in enumerate(mesh_info.sizes):
        if size > 1:
            state = broadcast_move(axis, 0, mesh_info, state.dtype)(state)
    generator.set_state(state.cpu())


def _device(mesh_info: MeshInfo) -> str:
    return "cpu" if mesh_info.device_type == "meta" else mesh_info.device_type


def _default_generator(mesh_info: MeshInfo) -> torch.Generator:
    return generator_for((), torch.device(_device(mesh_info)))


def _is_default(generator: torch.Generator) -> bool:
    return generator is generator_for((), generator.device)
