"""The folders of checkpoints: temporary folder, commit by rename, the `latest` pointer, retention.

    runs/.step-300.saving     being written; what a killed save leaves behind
    runs/step-300             complete: the folder above, renamed
    runs/.step-300.replaced   the checkpoint that step-300 replaces, for the moment between two renames
    runs/latest               the name of the checkpoint that was completed last, replaced after the rename
    runs/.step-300.latest     the next content of `latest`, until it replaces it

A rename is atomic, so `runs/step-300` is a complete checkpoint at any moment at which it exists.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError
from .index import INDEX, METADATA, order_of

LATEST = "latest"
_WHAT_TO_PASS = "pass the path given to save, or the folder that holds such checkpoints"


def saving(path: Path) -> Path:
    """Return the temporary folder in which a checkpoint is written."""
    return path.with_name(f".{path.name}.saving")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _deleting(path: Path) -> Path:
    return path.with_name(f".{path.name}.deleting")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has the metadata of a checkpoint, ours or PyTorch's."""
    return (path / METADATA).is_file()


def prepare(path: Path) -> None:
    """Create the empty folder in which a checkpoint will be written."""
    if path.name == LATEST or not path.name:
        raise CheckpointError(
            f"a checkpoint cannot be named {path.name!r}",
            f"choose another name, e.g. 'step-100'; the file {LATEST!r} names the newest checkpoint",
        )
    if path.exists() and not (is_checkpoint(path) or (path.is_dir() and not any(path.iterdir()))):
        raise CheckpointError(
            f"{path} exists and is no checkpoint: expected a new name or a folder with {METADATA}, found {_kind(path)}",
            "save to a new path, or to an earlier checkpoint, which is replaced",
        )
    _restore(path)
    target = saving(path)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)


def _kind(path: Path) -> str:
    return f"a folder of {len(list(path.iterdir()))} other files" if path.is_dir() else "a file"


def _restore(path: Path) -> None:
    """Put the earlier checkpoint back after a kill between the two renames of `commit`."""
    if _replaced(path).exists() and not path.exists():
        _replaced(path).rename(path)


def commit(path: Path, sync: bool, keep: int | None) -> None:
    """Rename the temporary folder to `path`, update the pointer, and delete all but the newest `keep` checkpoints.

    With `sync`, both renames are on the disk when this returns. A power failure between them does no harm: a pointer
    whose checkpoint is missing is ignored by `latest`.
    """
    source, old, pointer = saving(path), _replaced(path), path.with_name(f".{path.name}.{LATEST}")
    try:
        pointer.write_text(path.name + "\n", encoding="utf-8")
        if sync:
            sync_path(pointer)
            sync_path(source)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        source.rename(path)
        pointer.replace(path.with_name(LATEST))
    except BaseException:
        pointer.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)
    shutil.rmtree(old, ignore_errors=True)
    if keep is not None:
        _retain(path, keep)


def _retain(path: Path, keep: int) -> None:
    """Delete older checkpoints beside this one, and the remains of killed saves and deletions."""
    found = _complete(path.parent)
    for old in found[: max(0, len(found) - keep)]:
        if old != path:
            gone = _deleting(old)
            old.rename(gone)  # first, so that a killed deletion leaves no incomplete checkpoint under its name
            shutil.rmtree(gone, ignore_errors=True)
    for left in path.parent.iterdir():
        name, _, kind = left.name.removeprefix(".").rpartition(".")
        finished = kind in ("saving", "deleting") or (kind == "replaced" and (path.parent / name).exists())
        if left.name.startswith(".") and finished and left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        elif left.name.startswith(".") and kind == LATEST and left.is_file():
            left.unlink(missing_ok=True)


def _complete(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that shardwise wrote, in the order in which they were completed."""
    found = [path for path in folder.iterdir() if not path.name.startswith(".") and (path / INDEX).is_file()]
    return sorted(found, key=lambda path: (order_of(path), path.name))


def next_order(path: Path) -> int:
    """Return a number greater than that of every checkpoint in the folder."""
    return max((order_of(found) for found in _complete(path.parent)), default=0) + 1


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint in a folder that was completed last, or None if there is none.

    The pointer `latest` names it. If that checkpoint has been deleted, the newest existing one is returned.

    >>> path = save({"step": 100}, folder / "step-100")
    >>> latest(folder).name
    'step-100'
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    name = ""
    with suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    if name and Path(name).name == name and is_checkpoint(resolved(folder / name)):
        return resolved(folder / name)
    found = _complete(folder)
    return found[-1] if found else None


def resolved(path: Path) -> Path:
    """Return where a checkpoint is: `path`, or beside it after a kill between the two renames of `commit`."""
    return _replaced(path) if not path.exists() and is_checkpoint(_replaced(path)) else path


def find(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint at a path, or the latest one in the folder at that path."""
    at = resolved(Path(path))
    if is_checkpoint(at) or (at / INDEX).exists():
        return at
    inside = latest(at)
    if inside is not None:
        return inside
    if not at.exists():
        raise CheckpointError(f"no checkpoint at {at}: there is no such folder", _WHAT_TO_PASS)
    found = f"expected {METADATA} or the pointer {LATEST!r}, found {_kind(at)}"
    raise CheckpointError(f"no checkpoint at {at}: {found}", _WHAT_TO_PASS)


def sync_path(path: Path) -> None:
    """Flush a file's data, or the names in a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
