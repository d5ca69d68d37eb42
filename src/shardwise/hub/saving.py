"""`save`: one rank creates the files, and every rank writes its own byte ranges into them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.folders import saving, sync_path
from ..checkpoint.progress import Progress
from ..checkpoint.ranks import Ranks, on_all, ranks_of_world
from ..errors import CheckpointError
from ..fsdp import FSDPModule
from ..nn import ReplicateModule
from ..sharding.base import DTensorBase
from .conversions import to_files
from .files import Described, create_files, file_size, lay_out
from .folder import commit, prepare
from .positioned import Transfer, Writer
from .state import State, parameter_count, state_of
from .transfers import Patch, boxes_of, held_shards, patches_to_save, share, transfers_of


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    sync: bool = True,
    progress: bool | None = None,
) -> Path:
    """Save a model as a folder that `from_pretrained` of transformers reads, and return its path. All ranks call it.

    Each rank writes the elements of its local shards at their offsets in the safetensors files; replicas share the work
    evenly. Tied weights are written once, and conversions of transformers are reverted, as `save_pretrained` does.
    Nothing is gathered. Modules that are not of transformers have no configuration: only their weights are written.

    The model is written to a temporary folder beside `folder`, which replaces it atomically when all ranks are done.
    Other files of an earlier folder, such as a tokenizer, are kept.

    max_shard_size  the largest file; a larger model has several files and an index
    sync            flush all data to the disk before the folder is replaced
    progress        a bar on stderr; by default if it is a terminal

    >>> save(model, folder / "model").name
    'model'
    """
    at, ranks, state = Path(folder).absolute(), ranks_of_world(), state_of(model)
    _check(state)
    entries = to_files(model, state)
    beside, what = saving(at), f"cannot save {at}"
    described = {key: Described(tuple(entry.shape), entry.dtype) for key, entry in entries.items()}
    places, files, index = lay_out(beside, described, file_size(max_shard_size), parameter_count(state))

    def begin() -> None:
        if ranks.coordinator:
            prepare(at)
            _write_configuration(model, beside)
            create_files(beside, files, index)

    patches = [patch for key, entry in entries.items() for patch in patches_to_save(entry, places[key])]
    try:
        on_all(ranks, what, begin)
        on_all(ranks, what, lambda: _write(state, patches, ranks, sync, progress))
        on_all(ranks, what, lambda: _complete(at, ranks, sync))
    except Exception:
        if ranks.coordinator:
            with suppress(OSError):
                shutil.rmtree(beside)
        raise
    return at


def _check(state: State) -> None:
    for name, tensor in state.tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"{name!r} is on the meta device and has no values",
                "load the model first, or model.to_empty(device=...) and initialise it",
            )
        if isinstance(tensor, DTensorBase) and tensor._spec.layout.partial:
            raise CheckpointError(
                f"{name!r} is {tensor._spec!r}: no rank holds its values", "redistribute it to Shard or Replicate first"
            )


def _write(state: State, patches: list[Patch], ranks: Ranks, sync: bool, progress: bool | None) -> None:
    writes = _writes(state, patches)
    total = sum(transfer.nbytes for transfer in writes)
    bar = Progress("saving", total, progress if ranks.coordinator else False)
    with Writer(bar.add) as writer, torch.no_grad():
        for transfer in sorted(writes, key=lambda transfer: transfer.place):
            writer.write(transfer)
        if sync:
            writer.sync()
    bar.finish()


def _writes(state: State, patches: list[Patch]) -> list[Transfer]:
    """Return what this process writes: of elements that several ranks hold, only its share."""
    shards = {name: held_shards(tensor) for name, tensor in state.tensors.items()}
    found = []
    for number, patch in enumerate(patches):
        for box in boxes_of(patch, tuple(state.tensors[patch.name].shape)):
            for shard in shards[patch.name]:
                shares = (share(transfer, shard, number) for transfer in transfers_of(patch.stored, box, shard))
                found += [own for own in shares if own is not None]
    return found


def _complete(folder: Path, ranks: Ranks, sync: bool) -> None:
    if not ranks.coordinator:
        return
    if sync:
        for path in saving(folder).iterdir():
            sync_path(path)
    commit(folder, sync)


def _write_configuration(model: nn.Module, folder: Path) -> None:
    """Write `config.json` and `generation_config.json` as transformers does."""
    owner: Any = model
    config: Any = getattr(owner, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config.dtype = str(owner.dtype).removeprefix("torch.")
    config.architectures = [_own_class(model).__name__]
    config.save_pretrained(folder)
    if owner.can_generate():
        owner.generation_config.save_pretrained(folder)


def _own_class(model: nn.Module) -> type:
    """Return the class that a model had before `fully_shard` or `replicate` gave it a subclass."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, (FSDPModule, ReplicateModule)))
