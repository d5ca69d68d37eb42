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

from ..comm.groups import adopt
from ..comm.moves import all_gather, wait
from ..errors import WorldError
from ..mesh import MeshView
from ..world.mapping import generator_for

_checked: WeakKeyDictionary[MeshView, set[str]] = WeakKeyDictionary()


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
    view = adopt(device_mesh)
    _default(view).manual_seed(seed)
    _checked.pop(view, None)


def check_first_use(view: MeshView, generator: torch.Generator) -> None:
    """Compare this generator's state on all ranks of the mesh, unless this was done before."""
    if view.simulated or not _Switch.on:
        return
    seen = _checked.get(view)
    if seen is None:
        seen = _checked[view] = set()
    name = (
        f"the default {generator.device.type} generator" if _is_default(generator) else "the generator that was passed"
    )
    if name not in seen:
        seen.add(name)
        _compare(view, generator, name)


def _compare(view: MeshView, generator: torch.Generator, name: str) -> None:
    digest = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
    device = "cpu" if view.device_type in ("cpu", "meta") else view.device_type
    states = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
    # Axis by axis, the last one first: then they lie in the order of the mesh.
    for axis in reversed(range(len(view.sizes))):
        if view.sizes[axis] > 1:
            states = wait(all_gather(states, view.sizes[axis], view.groups[(axis,)]))
    found = states.tolist()
    common, count = Counter(found).most_common(1)[0]
    if count == len(found):
        return
    ranks = view.mesh.mesh.flatten().tolist()
    parted = [str(rank) for rank, state in zip(ranks, found, strict=True) if state != common]
    _checked.pop(view, None)
    raise WorldError(
        f"{name} is in another state on rank(s) {', '.join(parted)} than on the other ranks of {view!r}",
        "seed all ranks alike with torch.manual_seed(seed) or shardwise.random.manual_seed(seed, mesh), and draw for "
        "one rank alone from a generator of its own; shardwise.random.set_generator_check(False) turns this check off",
    )


def _default(view: MeshView) -> torch.Generator:
    if view.device_type in ("cpu", "meta"):
        return torch.default_generator
    return generator_for((), torch.device(view.device_type))


def _is_default(generator: torch.Generator) -> bool:
    if generator.device.type == "cpu":
        return generator is torch.default_generator
    return generator is generator_for((), generator.device)
