"""Writing the file of one rank: archives of tensors one after the other, then objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from .archive import archive_of, saved_object
from .blocks import BlockWriter
from .plan import RankPlan


class WrittenFile(NamedTuple):
    """The name, size, checksums and objects of the file of one rank."""

    name: str
    size: int
    sums: list[int]
    objects: dict[str, tuple[int, int]]
    """Offset and length of each object."""


Objects = dict[str, bytes]


class SavedObject(NamedTuple):
    """An object of the state as bytes, or the error that storing it will raise."""

    data: bytes | CheckpointError


def kept_object(value: object) -> object:
    """Return an object in a form that later changes do not affect: itself if it is immutable, else its bytes."""
    return value if _is_simple(value) or isinstance(value, SavedObject) else SavedObject(_saved(value))


def _is_simple(value: object) -> bool:
    """Return whether a value is None, a number or a string, which need no check that they can be loaded."""
    return value is None or type(value) in (bool, int, float, str)


def _saved(value: object) -> bytes | CheckpointError:
    """Return an object as bytes, or an error (not raised) if loading it would run code from the file."""
    data = saved_object(value)
    try:
        load_object(data)
    except CheckpointError as error:
        return CheckpointError(
            f"a {type(value).__module__}.{type(value).__qualname__}, which can only be loaded by running "
            f"code from the file ({error.problem})",
            "store tensors, numbers, strings, and lists, tuples and dicts of them",
        )
    return data


def saved_objects(state: Mapping[str, object], plan: RankPlan) -> Objects:
    """Return the objects that a rank writes, as bytes. Raise an error for one that only pickle could load."""
    known: dict[tuple[type, str], bytes] = {}
    found = {}
    for name in plan.objects:
        value = state[name]
        if _is_simple(value):
            key = (type(value), repr(value))
            if key not in known:
                known[key] = saved_object(value)
            found[name] = known[key]
            continue
        data = value.data if isinstance(value, SavedObject) else _saved(value)
        if isinstance(data, CheckpointError):
            raise CheckpointError(f"{name!r} is {data.problem}", data.fix)
        found[name] = data
    return found


def load_object(data: bytes) -> object:
    """Return an object from the bytes of `saved_object`, loaded with weights_only=True."""
    import io
    import pickle

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(" ".join(str(error).split())[:300]) from None


def write_file(
    folder: Path,
    plan: RankPlan,
    tensors: Iterable[Tensor],
    objects: Objects,
    sync: bool,
    written: Callable[[int], None],
) -> WrittenFile | None:
    """Write the file of one rank, and return its record; None if there is nothing to write."""
    if not plan.entries and not objects:
        return None
    writer = BlockWriter(folder / plan.file, sync, written)
    places: dict[str, tuple[int, int]] = {}
    stored: dict[bytes, tuple[int, int]] = {}
    try:
        for (piece, start, _, _), tensor in zip(plan.entries, tensors, strict=True):
            archive = archive_of(piece.dtype, piece.size)
            writer.pad_to(start)
            writer.write(archive.before)
            writer.write_tensor(tensor)
            writer.write(archive.after)
        for name, data in objects.items():
            if data not in stored:  # equal objects share a place in the file
                writer.pad_to(-(-writer.size // 64) * 64)
                stored[data] = (writer.size, len(data))
                writer.write(data)
            places[name] = stored[data]
        writer.close()
    finally:
        writer.abandon()
    return WrittenFile(plan.file, writer.size, writer.sums, places)
