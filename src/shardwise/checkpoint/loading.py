"""Loading: everything is checked on all ranks before the first element of the state changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..dispatch.gather_cache import after_write
from ..sharding.base import DTensorBase
from .background import finish_background
from .folders import find
from .optimizers import allocate_states, has_optimizers, use_stored_histories
from .progress import Progress
from .ranks import Ranks, on_all, ranks_of_world, together
from .read import read_bytes, read_tensors
from .reads import Reads, plan_reads
from .state import FlatState, State, flatten, give_back, put, state_dicts
from .stored import Stored
from .write import load_object


class _Opened(TypedDict, total=False):
    """An opened checkpoint and its reads: the results of functions that run on all ranks."""

    stored: Stored
    reads: Reads


def load(
    state: State,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    progress: bool | None = None,
) -> Path:
    """Load a checkpoint into a state, in place, and return its path. All ranks call it with the same path.

    `path` is a checkpoint, or a folder of checkpoints whose latest one is loaded. The state is a nested dict as for
    `save`, on any mesh and with any placements; other values of the checkpoint are ignored. Modules and optimizers are
    loaded by their own `load_state_dict`; an optimizer may have made no step yet.

    Names, shapes, dtypes, file sizes and checksums are checked on all ranks first. If anything is wrong on any rank,
    all raise a `CheckpointError` that says what, where, what was expected and what was found, and the state is
    unchanged.

    strict    raise an error if a name of the state is not in the checkpoint; False leaves such values unchanged
    cast      convert dtypes instead of raising an error if they differ
    verify    compare checksums; False saves one pass over the files
    progress  show a progress bar on stderr; by default if stderr is a terminal

    >>> path = save({"model": model}, folder / "step-100")
    >>> path = load({"model": model}, path)                  # or load({"model": model}, folder), the latest one
    """
    finish_background()
    ranks = ranks_of_world()
    what = f"cannot load {Path(path)}"
    folder = together(ranks, what, lambda: find(path) if ranks.coordinator else Path())[0]
    opened: _Opened = {}
    if has_optimizers(state):
        on_all(ranks, what, lambda: opened.update({"stored": Stored(folder)}))
        allocate_states(state, opened["stored"])
    loaded = state_dicts(state)
    if has_optimizers(state):
        use_stored_histories(state, loaded, opened["stored"])
    flat = _materialized(flatten(loaded), loaded)

    def plan() -> set[tuple[str, int]]:
        stored = opened.get("stored") or Stored(folder)
        reads = plan_reads(flat, stored, ranks, strict, cast)
        opened.update({"stored": stored, "reads": reads})
        return reads.blocks(stored) if verify and stored.index is not None else set()

    wanted = together(ranks, what, plan)
    stored, reads = opened["stored"], opened["reads"]
    objects: dict[str, object] = {}

    def check() -> None:
        stored.verify(_my_share(wanted, ranks))
        objects.update({name: load_object(read_bytes(folder, place)) for name, place in reads.objects.items()})

    on_all(ranks, what, check)
    _apply(folder, reads, progress if ranks.coordinator else False)
    on_all(ranks, what, lambda: None)  # a rank that returns may delete files that others still read
    for name, value in objects.items():
        put(loaded, flat.paths[name], value)
    give_back(state, loaded)
    return folder


def _my_share(wanted: list[set[tuple[str, int]]], ranks: Ranks) -> list[tuple[str, int]]:
    """Return the blocks that this process verifies: each block is verified by one of the processes that read it."""
    if len(wanted) == 1:
        return list(wanted[0])
    loads = [0] * len(wanted)
    mine = []
    for block in sorted(set().union(*wanted)):
        verifier = min((at for at, blocks in enumerate(wanted) if block in blocks), key=loads.__getitem__)
        loads[verifier] += 1
        if verifier == ranks.mine[0]:
            mine.append(block)
    return mine


def _materialized(flat: FlatState, loaded: dict[str, object]) -> FlatState:
    """Return the state with memory for tensors on the meta device."""
    for name, value in flat.values.items():
        if isinstance(value, Tensor) and value.is_meta:
            device = value._spec.mesh_info.device_type if isinstance(value, DTensorBase) else "cpu"
            flat.values[name] = torch.empty_like(value, device=device)
            put(loaded, flat.paths[name], flat.values[name])
    return flat


def _apply(folder: Path, reads: Reads, progress: bool | None) -> None:
    bar = Progress("loading", sum(read.target.nbytes for read in reads.tensors), progress)
    with torch.no_grad():
        read_tensors(folder, reads.tensors, bar.add)
    bar.finish()
    for tensor in reads.written:  # autograd has not counted the writes to their memory
        if not tensor.is_inference():
            increment_version(tensor)
        if isinstance(tensor, DTensorBase):
            after_write(tensor)
