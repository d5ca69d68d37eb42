"""`load`: build on the meta device, distribute, compare keys and shapes, and read the local shards."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.progress import Progress
from ..checkpoint.ranks import on_all, ranks_of_world
from ..dispatch.gather_cache import forget_gathered
from ..errors import CheckpointError
from .build import build
from .conversions import expected_anyway, from_files
from .files import Contents, Stored, read_folder
from .memory import allocate, compute_lost_buffers
from .mosaic import Mosaic
from .plans import Plan, apply_plan, describe_to_transformers
from .positioned import Reader, Transfer
from .state import State, state_of
from .transfers import Patch, boxes_of, held_shards, patches_to_load, transfers_of


@dataclass
class LoadReport:
    """The number of bytes that a load has read: for headers, and for tensors by rank of this process.

    >>> path, read = save(model, folder), LoadReport()
    >>> model = load(model, folder, mesh, report=read)
    >>> read
    """

    header_bytes: int = 0
    read_bytes: dict[int, int] = field(default_factory=dict)
    shard_bytes: dict[int, int] = field(default_factory=dict)
    """The bytes of the local shards by rank, in the dtypes of the files."""


def load(
    model: object,
    folder: str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    plan: Plan = None,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    progress: bool | None = None,
    report: LoadReport | None = None,
) -> Any:
    """Load a model from the safetensors files of a folder; each rank reads only the bytes of its own shards.

    `model` is a class of transformers, which is built from the folder's `config.json`; a function without arguments
    that returns a module; or a module. Classes and functions are built on the meta device, and only local shards are
    allocated.

    `plan` defines how parameters are distributed over `mesh`:

    - styles by path, as `parallelize_module` takes them; paths may begin in the base model, as those of
      `config.base_model_tp_plan` do
    - "base_model_tp_plan": the plan of the model itself
    - "fully_sharded": `fully_shard` of each block and of the model
    - a function `(name, parameter) -> placements`, as `shard_parameters` takes it
    - None: if any parameters are distributed already, nothing changes; else all are replicated over `mesh`

    dtype     the dtype of floating-point parameters, cast as they are read; by default that of the configuration
    strict    whether keys of the files that the model lacks are an error; keys that the files lack always are
    progress  a bar on stderr; by default if it is a terminal
    report    a `LoadReport` that is filled with the bytes that were read

    All ranks call it. Missing, unexpected and misshapen keys are listed in one error before anything is read.

    >>> path = save(model, folder)
    >>> model = load(make_model, folder, mesh, plan="fully_sharded")     # make_model() returns the module
    """
    at, ranks = Path(folder), ranks_of_world()
    contents: list[Contents] = []
    on_all(ranks, f"cannot load {at}", lambda: contents.append(read_folder(at)))
    built = build(model, at, dtype)
    compute_lost_buffers(built)
    built = apply_plan(built, mesh, plan)
    describe_to_transformers(built, mesh, plan)
    patches = _fitting(built, at, contents[0].tensors, state_of(built), strict)
    allocate(built, mesh)
    reads = _reads(state_of(built), patches)
    totals = {rank: sum(transfer.nbytes for transfer in transfers) for rank, transfers in reads.items()}
    bar = Progress("loading", sum(totals.values()), progress if ranks.coordinator else False)

    def read() -> dict[int, int]:
        with Reader(bar.add) as reader, torch.no_grad():
            return {rank: _read_all(reader, transfers) for rank, transfers in reads.items()}

    done: list[dict[int, int]] = []
    on_all(ranks, f"cannot load {at}", lambda: done.append(read()))
    bar.finish()
    forget_gathered()  # gathered copies of earlier values
    if report is not None:
        report.header_bytes, report.read_bytes, report.shard_bytes = contents[0].header_bytes, done[0], totals
    return built


def load_with_report(*args: Any, **options: Any) -> tuple[Any, LoadReport]:
    """Return the model and the report of `load(*args, report=LoadReport(), **options)`.

    >>> path = save(model, folder)
    >>> model, read = load_with_report(model, folder, mesh)
    """
    report = LoadReport()
    return load(*args, report=report, **options), report


def _read_all(reader: Reader, transfers: list[Transfer]) -> int:
    before = reader.bytes
    for transfer in sorted(transfers, key=lambda transfer: transfer.place):
        reader.read(transfer)
    return reader.bytes - before


def _reads(state: State, patches: list[Patch]) -> dict[int, list[Transfer]]:
    """Return what each rank of this process reads."""
    shards = {name: held_shards(tensor) for name, tensor in state.tensors.items()}
    found: dict[int, list[Transfer]] = {}
    for patch in patches:
        for box in boxes_of(patch, tuple(state.tensors[patch.name].shape)):
            for shard in shards[patch.name]:
                found.setdefault(shard.rank, []).extend(transfers_of(patch.stored, box, shard))
    return found


# ---- keys and shapes -------------------------------------------------------------------------------------------------


def _fitting(model: nn.Module, folder: Path, stored: dict[str, Stored], state: State, strict: bool) -> list[Patch]:
    """Return the patches of all tensors of the model. Raise one error for all keys and shapes that do not fit."""
    files = {key: Mosaic.of(key, tensor.shape, tensor.dtype) for key, tensor in stored.items()}
    found, unexpected = from_files(model, files, state)
    patches: list[Patch] = []
    missing: list[str] = []
    wrong: list[str] = []
    for name, keys in state.names().items():
        one_key = state.entries[keys[0]].shape == state.tensors[name].shape
        there = [key for key in keys if key in found]
        if one_key and not there:
            missing.append(keys[0])
        elif not one_key:  # one key for each expert
            missing += [key for key in keys if key not in found]
        for key in there[:1] if one_key else there:
            entry = state.entries[key]
            if found[key].shape != entry.shape:
                wrong.append(f"{key}: {list(found[key].shape)} in the files, {list(entry.shape)} in the model")
            else:
                patches += patches_to_load(entry, found[key], stored)
    unfilled = {name for name, tensor in state.tensors.items() if tensor.is_meta}
    missing = [key for key in missing if key in unfilled or key in expected_anyway(model, [key], "missing")]
    unexpected = expected_anyway(model, unexpected, "unexpected") if strict else []
    if missing or unexpected or wrong:
        raise _misfit(model, folder, {"missing": missing, "unexpected": unexpected, "of another shape": wrong})
    return patches


def _misfit(model: nn.Module, folder: Path, problems: dict[str, list[str]]) -> CheckpointError:
    lines = [
        f"  {len(keys)} {kind}:\n" + "\n".join(f"    {key}" for key in keys) for kind, keys in problems.items() if keys
    ]
    only_unexpected = not problems["missing"] and not problems["of another shape"]
    fix = "load with strict=False to leave them out" if only_unexpected else "load it into the model that was saved"
    return CheckpointError(f"{folder} does not fit {type(model).__name__}:\n" + "\n".join(lines) + "\n", fix)
