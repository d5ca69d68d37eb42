"""PyTorch's writer of safetensors files, which writes one block of a tensor for each name and file.

A process may have several blocks of one tensor: those of all ranks in a simulated world, or those of an interleaved
shard. Blocks that together form one larger block are merged. Other blocks raise an error before anything is written, as
do ranks that would write the same file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch.python_functions import Function, Place
from ..errors import InputError, PlacementError
from .replaced import Replaced

if TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

_replaced = Replaced()


def install_safetensors_writer() -> None:
    """Make `HuggingFaceStorageWriter` merge blocks, and raise an error where it would lose data."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    _replaced.replace([Place(HuggingFaceStorageWriter, "prepare_global_plan")], _checking)
    _replaced.replace([Place(HuggingFaceStorageWriter, "write_data")], _merging)


def uninstall_safetensors_writer() -> None:
    """Put the original methods back."""
    _replaced.restore()


def _checking(original: Function) -> Function:
    @functools.wraps(original)
    def prepare_global_plan(writer: HuggingFaceStorageWriter, plans: list[SavePlan]) -> object:
        for plan in plans:
            for name, items in _by_name(plan.items).items():
                if len(items) > 1:
                    _merged_block(name, [_block(item) for item in items])
                if writer.enable_consolidation and not _block(items[0]).sizes:
                    raise InputError(
                        f"{name!r} has no dims: with enable_consolidation, HuggingFaceStorageWriter writes it as zero",
                        "save it with one dim, x.view(1), or without enable_consolidation",
                    )
        if not writer.save_distributed:
            _refuse_common_files(plans, writer.fqn_to_index_mapping or {})
        return original(writer, plans)

    return prepare_global_plan


def _merging(original: Function) -> Function:
    @functools.wraps(original)
    def write_data(writer: HuggingFaceStorageWriter, plan: SavePlan, planner: SavePlanner) -> object:
        merged = {name: items for name, items in _by_name(plan.items).items() if len(items) > 1}
        if not merged:
            return original(writer, plan, planner)
        others = [item for item in plan.items if item.index.fqn not in merged]
        plan = dataclasses.replace(plan, items=[*others, *map(_merged_item, merged.values())])
        return original(writer, plan, _MergingPlanner(planner, merged))

    return write_data


class _MergingPlanner:
    """A planner that returns merged blocks for the tensors in `merged`, and leaves the rest to another planner."""

    def __init__(self, planner: Any, merged: dict[str, list[WriteItem]]) -> None:
        self.planner, self.merged = planner, merged

    def resolve_data(self, item: WriteItem) -> object:
        """Return the data of an item of a plan."""
        items = self.merged.get(item.index.fqn)
        if items is None:
            return self.planner.resolve_data(item)
        box = _block(item)
        found: Tensor | None = None
        for part in items:
            data, block = self.planner.resolve_data(part), _block(part)
            if found is None:
                found = torch.empty(box.sizes, dtype=data.dtype, device=data.device)
            starts = [start - first for start, first in zip(block.offsets, box.offsets, strict=True)]
            found[tuple(slice(i, i + n) for i, n in zip(starts, block.sizes, strict=True))] = data
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self.planner, name)


def _by_name(items: Iterable[WriteItem]) -> dict[str, list[WriteItem]]:
    """Return the tensor items of a plan, by name."""
    found: dict[str, list[WriteItem]] = {}
    for item in items:
        if item.tensor_data is not None:
            found.setdefault(item.index.fqn, []).append(item)
    return found


def _block(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None, "only tensors are merged"
    return item.tensor_data.chunk


def _merged_item(items: list[WriteItem]) -> WriteItem:
    """Return the item that replaces several items of one name."""
    first = items[0]
    assert first.tensor_data is not None
    box = _merged_block(first.index.fqn, [_block(item) for item in items])
    index = dataclasses.replace(first.index, offset=box.offsets)
    return dataclasses.replace(first, index=index, tensor_data=dataclasses.replace(first.tensor_data, chunk=box))


def _merged_block(name: str, blocks: list[ChunkStorageMetadata]) -> ChunkStorageMetadata:
    """Return the block that these blocks form together, or raise an error if they leave gaps."""
    starts = [min(column) for column in zip(*(block.offsets for block in blocks), strict=True)]
    ends = [[start + size for start, size in zip(b.offsets, b.sizes, strict=True)] for b in blocks]
    sizes = [max(column) - start for column, start in zip(zip(*ends, strict=True), starts, strict=True)]
    if math.prod(sizes) != sum(block.sizes.numel() for block in blocks):
        raise PlacementError(
            f"a safetensors file holds one block of a tensor, but a rank holds {len(blocks)} blocks of {name!r} that "
            "do not form one block together",
            "redistribute it first, e.g. to Shard(0), or save with another storage writer",
        )
    return type(blocks[0])(offsets=torch.Size(starts), sizes=torch.Size(sizes))


def _refuse_common_files(plans: list[SavePlan], file_of: dict[str, int]) -> None:
    """Raise an error if two ranks write the same file."""
    files = [{file_of.get(item.index.fqn, 1) for item in plan.items} for plan in plans]
    for file in set().union(*files):
        ranks = sum(file in written for written in files)
        if ranks > 1:
            raise InputError(
                f"{ranks} ranks would write the same safetensors file, and the last one would overwrite the others",
                "pass save_distributed=True to HuggingFaceStorageWriter; enable_consolidation=True writes full tensors",
            )
