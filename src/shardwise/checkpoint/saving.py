"""Saving: plan, write to a temporary folder, commit; `async_save` does so in a background thread."""

from __future__ import annotations

import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, get_args

from torch import Tensor

from ..errors import CheckpointError
from .background import Saving, finish_background, let_optimizers_wait, start_background
from .blocks import BLOCK
from .folders import commit, next_order, prepare, saving
from .index import INDEX, METADATA, FileRecord, Index, index_text
from .metadata import metadata_of
from .plan import Contents, Plan, PlanCache, plan_cache, plan_save, sources
from .progress import Progress
from .ranks import Ranks, ranks_of_world, through_coordinator
from .snapshot import Snapshot, check_snapshot
from .staging import Copies, Deferred, Staging, copied
from .state import FlatState, State, flatten, state_dicts
from .write import Objects, WrittenFile, kept_object, saved_objects, write_file


class _Job(NamedTuple):
    """A planned save: what to write, and how to commit it."""

    path: Path
    ranks: Ranks
    plan: Plan
    values: dict[str, object]
    sync: bool
    keep: int | None

    def sources(self) -> list[list[Tensor]]:
        """Return the tensors to write, for each rank of this process: views of the state."""
        return sources(self.values, self.plan.mine, self.ranks)

    def objects(self) -> list[Objects]:
        """Return the other values to write, as bytes, for each rank of this process."""
        return [saved_objects(self.values, plan) for plan in self.plan.mine]

    def write(self, tensors: list[list[Tensor]], objects: list[Objects], written: Callable[[int], None]) -> Written:
        """Write the files of this process's ranks, and return their records."""
        folder = saving(self.path)
        rows = zip(self.plan.mine, tensors, objects, strict=True)
        files = [write_file(folder, *row, self.sync, written) for row in rows]
        return [file for file in files if file is not None]


Written = list[WrittenFile]


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
    be values of it. DTensors are stored once, whatever their placements. Plain tensors are assumed to be replicated.
    Other values are stored by the first rank that has them.

    The checkpoint is written to a temporary folder next to `path`, which is renamed when all ranks have written their
    files. Then the file `latest` in the parent folder is updated. If a rank fails or dies at any moment, the previous
    checkpoint is intact.

    keep      number of checkpoints to keep in the parent folder; older ones and remains of killed saves are deleted
    sync      call fsync for all files before the rename, so that the checkpoint survives a power failure
    progress  show a progress bar on stderr; by default if stderr is a terminal

    >>> save({"model": model, "step": 100}, folder / "step-100").name
    'step-100'
    """
    finish_background()
    job = _planned(flatten(state_dicts(state)), ranks_of_world(), Path(path).absolute(), sync, keep)
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
    staging: Staging = "buffer",
) -> Saving:
    """Copy what this rank will write, and save it in the background. Return a `Saving` to wait for.

    One save is under way at a time, with at most one copy of the data: the next call of `save`, `async_save` or `load`
    waits for it, and raises its error if it failed.

    staging  "buffer": copy the data to memory that is kept for the next save, pinned if the data is on a GPU. The state
             may be changed as soon as this returns; copies from a GPU are ordered by the current stream.
             "deferred": the same copy, made in the background. This returns at once, optimizers wait for the copy
             before their next step, and other code that changes the state calls `staged()` of the result first; a
             change that came too early makes the save fail.
             "snapshot": fork a process, whose memory the operating system keeps apart. For data on the CPU, if little
             of it changes while it is saved: it takes no second copy of what does not change.

    >>> saving = async_save({"model": model}, folder / "step-100")
    >>> saving.wait().name
    'step-100'
    """
    if staging not in get_args(Staging):
        raise CheckpointError(
            f"async_save got staging={staging!r}", f"pass one of {', '.join(map(repr, get_args(Staging)))}"
        )
    finish_background()
    ranks, at = ranks_of_world(), Path(path).absolute()
    flat = flatten(state_dicts(state))
    if staging != "deferred":
        job = _planned(flat, ranks, at, sync, keep)
        write = _staged(job, staging)
        return start_background(at, lambda staged: _carry_out(job, write), staged=True)
    let_optimizers_wait()
    deferred, plans = Deferred(state, flat), plan_cache()

    def work(staged: Callable[[], None]) -> None:
        job = _planned(FlatState(deferred.values, flat.paths), ranks, at, sync, keep, plans)
        write = _copied(job, deferred.copied)
        staged()
        _carry_out(job, write)

    return start_background(at, work)


def _planned(
    flat: FlatState, ranks: Ranks, path: Path, sync: bool, keep: int | None, plans: PlanCache | None = None
) -> _Job:
    def begin() -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} would delete the new checkpoint", "pass keep=1 or more")
        if ranks.coordinator:
            prepare(path)

    with _cleaned_up(path, ranks):
        plan = plan_save(flat, ranks, f"cannot save {path}", begin, plans)
        return _Job(path, ranks, plan, flat.values, sync, keep)


@contextmanager
def _cleaned_up(path: Path, ranks: Ranks) -> Iterator[None]:
    """Delete the temporary folder if the save fails."""
    try:
        yield
    except BaseException:
        if ranks.coordinator:
            shutil.rmtree(saving(path), ignore_errors=True)
        raise


def _staged(job: _Job, staging: Staging) -> Callable[[], Written]:
    """Copy or fork the data, and return a function that writes it."""
    return _copied(job, copied) if staging == "buffer" else _snapshot(job)


def _copied(job: _Job, copy: Callable[[list[list[Tensor]]], Copies]) -> Callable[[], Written]:
    """Copy the data, and return a function that writes it. If the copy fails, that function raises its error."""
    try:
        tensors, wait = copy(job.sources())
        kept = {name: kept_object(job.values[name]) for plan in job.plan.mine for name in plan.objects}
    except Exception as error:
        return _failing(error)

    def write() -> Written:
        wait()
        return job.write(tensors, [saved_objects(kept, plan) for plan in job.plan.mine], lambda count: None)

    return write


def _snapshot(job: _Job) -> Callable[[], Written]:
    try:
        tensors = job.sources()
        check_snapshot(tensor for row in tensors for tensor in row)
        return Snapshot(lambda check: job.write(tensors, job.objects(), lambda count: check())).result
    except Exception as error:
        return _failing(error)


def _failing(error: Exception) -> Callable[[], Written]:
    def fail() -> Written:
        raise error

    return fail


# ---- writing and committing ------------------------------------------------------------------------------------------


def _carry_out(job: _Job, write: Callable[[], Written]) -> None:
    """Write the files of this process's ranks; when all ranks are done, the coordinator commits."""

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
