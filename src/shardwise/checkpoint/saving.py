"""Saving: plan, write beside, commit. In the background, what comes after a copy of the data is left to a thread."""

from __future__ import annotations

import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from .background import Saving, finish_background, staging_buffer, start_background
from .blocks import BLOCK
from .folders import commit, next_order, prepare, saving
from .index import INDEX, METADATA, FileRecord, Index, index_text
from .metadata import metadata_of
from .plan import Contents, Plan, plan_save, sources
from .progress import Progress
from .ranks import Ranks, ranks_of_world, through_coordinator
from .snapshot import Snapshot, can_snapshot
from .state import State, flatten, state_dicts
from .write import Objects, WrittenFile, saved_objects, write_file


class _Job(NamedTuple):
    """A planned save: what to write, and what to do when all ranks have written."""

    path: Path
    ranks: Ranks
    plan: Plan
    values: dict[str, Any]
    sync: bool
    keep: int | None

    def sources(self) -> list[list[Tensor]]:
        """The tensors to write, for each rank of this process: views of the state."""
        return sources(self.values, self.plan.mine, self.ranks)

    def objects(self) -> list[Objects]:
        """The other values to write, as bytes."""
        return [saved_objects(self.values, plan) for plan in self.plan.mine]

    def write(self, tensors: list[list[Tensor]], objects: list[Objects], written: Callable[[int], None]) -> Written:
        """Write the files of this process's ranks."""
        folder = saving(self.path)
        rows = zip(self.plan.mine, tensors, objects, strict=True)
        files = [write_file(folder, *row, self.sync, written) for row in rows]
        return [file for file in files if file is not None]


Written = list[WrittenFile]
Staging = Literal["snapshot", "buffer"]


def save(
    state: State,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    sync: bool = True,
    progress: bool | None = None,
) -> Path:
    """Save a state as the checkpoint `path`, a folder, and return its path. All ranks call it with the same path.

    The state is a nested dict of tensors and plain values; modules, optimizers and other objects with `state_dict` may
    be values of it. DTensors are stored once, whatever their placements, plain tensors are taken to be replicated, and
    other values are those of the first rank that has them.

    The checkpoint is written beside `path`, and renamed when all ranks have written their files. Then the pointer
    `latest` in the folder around it is moved. If a rank fails or dies at any moment, the checkpoint that was there
    before is intact.

    keep      keep this many checkpoints in the folder around `path`, and delete older ones and what killed saves left
    sync      have all data on the disk before the rename, so that a power failure does no harm either
    progress  a bar on stderr; by default if it is a terminal
    """
    job = _planned(state, path, sync, keep)
    total = sum(plan.nbytes for plan in job.plan.mine)
    bar = Progress("saving", total, progress if job.ranks.coordinator else False)
    _carry_out(job, lambda: job.write(job.sources(), job.objects(), bar.add))
    bar.finish()
    return job.path


def async_save(
    state: State,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    sync: bool = True,
    staging: Staging | None = None,
) -> Saving:
    """Stage what this rank will write, and save it in the background. Returns an object to wait for.

    The state may be changed as soon as this returns. One save is under way at a time, with at most one copy of the
    data: the next call of `save`, `async_save` or `load` waits for it, and raises its error if it failed.

    staging  "buffer": copy to memory that is kept for the next save, pinned if there is a GPU; "snapshot": let the
             operating system copy the pages that are written meanwhile. By default a snapshot if all is on the CPU.
    """
    job = _planned(state, path, sync, keep)
    write = _staged(job, staging)
    return start_background(job.path, lambda: _carry_out(job, write))


def _planned(state: State, path: str | os.PathLike[str], sync: bool, keep: int | None) -> _Job:
    finish_background()
    ranks, at = ranks_of_world(), Path(path).absolute()
    flat = flatten(state_dicts(state))

    def begin() -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep}", "at least the new checkpoint is kept: keep=1 or more")
        if ranks.coordinator:
            prepare(at)

    with _cleaned_up(at, ranks):
        return _Job(at, ranks, plan_save(flat, ranks, f"cannot save {at}", begin), flat.values, sync, keep)


@contextmanager
def _cleaned_up(path: Path, ranks: Ranks) -> Iterator[None]:
    """Delete what was written of a checkpoint if it fails."""
    try:
        yield
    except BaseException:
        if ranks.coordinator:
            shutil.rmtree(saving(path), ignore_errors=True)
        raise


def _staged(job: _Job, staging: Staging | None) -> Callable[[], Written]:
    """Stage the data. Returns what writes it; an error of this rank is raised there, so that all ranks learn of it."""
    try:
        tensors = job.sources()
        safe = can_snapshot(tensor for row in tensors for tensor in row)
        if staging == "snapshot" and not safe:
            raise CheckpointError("a snapshot of tensors on a GPU or in shared memory", 'pass staging="buffer"')
        if staging != "buffer" and safe:
            return Snapshot(lambda check: job.write(tensors, job.objects(), lambda count: check())).result
        copies, objects = _copied(tensors), job.objects()
        return lambda: job.write(copies, objects, lambda count: None)
    except Exception as caught:
        error = caught

        def fail() -> Written:
            raise error

        return fail


def _copied(tensors: list[list[Tensor]]) -> list[list[Tensor]]:
    """Copies of tensors, in the staging memory."""
    buffer, end = staging_buffer(sum(_aligned(tensor) for row in tensors for tensor in row)), 0
    copies: list[list[Tensor]] = []
    for row in tensors:
        copies.append([])
        for tensor in row:
            place = buffer[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach(), non_blocking=True)
            copies[-1].append(place)
            end += _aligned(tensor)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copies


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64


# ---- writing and committing ------------------------------------------------------------------------------------------


def _carry_out(job: _Job, write: Callable[[], Written]) -> None:
    """Write the files of this process's ranks; when all have, the coordinator commits."""

    def complete(written: list[Written]) -> list[None]:
        assert job.plan.contents is not None, "the coordinator has the contents"
        files = [file for files in written for file in files]
        _write_index(saving(job.path), job.plan.contents, files, next_order(job.path), job.sync)
        commit(job.path, job.sync, job.keep)
        return [None] * len(written)

    with _cleaned_up(job.path, job.ranks):
        through_coordinator(job.ranks, f"cannot save {job.path}", write, complete)


def _write_index(folder: Path, contents: Contents, files: list[WrittenFile], order: int, sync: bool) -> None:
    metadata = pickle.dumps(metadata_of(contents, files))
    starts = {plan.file: {entry.start: entry.data for entry in plan.entries} for plan in contents.plans}
    records = {file.name: FileRecord(file.size, file.sums, starts[file.name]) for file in files}
    index = Index(order, BLOCK, len(metadata), zlib.crc32(metadata), records)
    for name, data in ((METADATA, metadata), (INDEX, index_text(index).encode())):
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
