"""A temporary folder beside the target, which replaces it when it is complete.

Files that a save does not write (a tokenizer, a model card) stay in the folder: the new one links to them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from ..checkpoint.folders import saving, sync_path
from ..errors import CheckpointError
from .files import is_weights


def prepare(folder: Path) -> Path:
    """Return a new, empty temporary folder to write a model to, after removing what a killed save has left."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file", "save to a folder")
    replaced = _replaced(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)  # a save was killed between the two renames of `commit`
    beside = saving(folder)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def commit(folder: Path, sync: bool) -> None:
    """Replace the target by the complete temporary folder."""
    beside, replaced = saving(folder), _replaced(folder)
    if folder.exists():
        _keep_others(folder, beside)
    if sync:
        sync_path(beside)
    shutil.rmtree(replaced, ignore_errors=True)
    if not folder.exists():
        beside.rename(folder)
    elif not _exchange(beside, folder):  # two renames, for file systems that cannot exchange two folders at once
        folder.rename(replaced)
        beside.rename(folder)
    if sync:
        sync_path(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(beside, ignore_errors=True)  # after an exchange, the earlier folder


_HERE, _EXCHANGE = -100, 2
"""Arguments of `renameat2`: AT_FDCWD and RENAME_EXCHANGE."""


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically. Return False if the system does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return renameat2 is not None and renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def _keep_others(folder: Path, beside: Path) -> None:
    """Link files that this save does not write from the earlier folder to the new one."""
    for path in folder.iterdir():
        target = beside / path.name
        if is_weights(path.name) or target.exists():
            continue
        if path.is_dir():
            shutil.copytree(path, target, copy_function=_link)
        else:
            _link(path, target)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")
