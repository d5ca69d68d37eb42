"""Map the tensors in files to the entries of a state dict: transformers' own conversions, run on mosaics.

In checkpoints of a mixture of experts, each expert has a matrix, `experts.3.w1.weight`, where the module has one
stacked parameter. Other checkpoints have old names, or lack the prefix of a model with a head. Tables in transformers
define these conversions. For models that are not of transformers, files have the keys of the state dict.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from .mosaic import Mosaic
from .state import State

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Converted(NamedTuple):
    """The entries of the state dict, assembled from tensors in files, and the keys of files that the model lacks."""

    entries: dict[str, Mosaic]
    unexpected: list[str]


def _of_transformers(model: nn.Module) -> bool:
    return hasattr(model, "base_model_prefix") and hasattr(model, "config")


def _loading() -> ModuleType | None:
    """Return the module of transformers that converts weights, or None before version 5, which has none."""
    try:
        from transformers import core_model_loading
    except ImportError:
        return None
    return core_model_loading


def from_files(model: nn.Module, files: dict[str, Mosaic], state: State) -> Converted:
    """Assemble the entries of the state dict from the tensors in files."""
    loading = _loading() if _of_transformers(model) else None
    if loading is None:
        return Converted(
            {key: file for key, file in files.items() if key in state.entries},
            [key for key in files if key not in state.entries],
        )
    from transformers.conversion_mapping import get_model_conversion_mapping

    owner: Any = model
    mapping = get_model_conversion_mapping(owner)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = owner.base_model_prefix
    used: dict[str, Any] = {}
    unexpected = []
    for key, file in sorted(files.items(), key=lambda item: loading.dot_natural_key(item[0])):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state.entries)
        if name not in state.entries and key in state.entries:
            name, pattern = loading.rename_source_key(key, [], [], prefix, state.entries)
        if name not in state.entries:
            unexpected.append(key)
            continue
        if pattern is None:
            step = used.setdefault(name, loading.WeightRenaming(key, name))
        else:
            step = used.setdefault(name, copy.deepcopy(by_pattern[pattern]))
        step.add_tensor(name, key, pattern or key, file)
    entries: dict[str, Mosaic] = {}
    for name, step in used.items():
        found = step.convert(name, model=owner, config=owner.config)
        entries |= {key: value[0] if isinstance(value, list) else value for key, value in found.items()}
    owner._weight_conversions = [each for each in mapping if each.was_used()]  # for saving, as transformers keeps them
    return Converted(entries, unexpected)


def to_files(model: nn.Module, state: State) -> dict[str, Mosaic]:
    """Assemble the tensors of files from the entries of the state dict; tied weights are stored once."""
    entries = _without_ties(model, state)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    entries = {key: entry for key, entry in entries.items() if key not in ignored}
    loading = _loading() if _of_transformers(model) else None
    return entries if loading is None else loading.revert_weight_conversion(model, entries)


def _without_ties(model: nn.Module, state: State) -> dict[str, Mosaic]:
    """Return the entries with one key for each tied weight, the one that transformers stores."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    dropped: set[str] = set()
    for name, keys in state.names().items():
        if len(keys) < 2 or state.entries[keys[0]].shape != state.tensors[name].shape:
            continue  # not tied: one key, or a key for each expert
        kept = next((key for key in keys if key not in tied), keys[0])
        dropped |= set(keys) - {kept}
    return {key: entry for key, entry in state.entries.items() if key not in dropped}


# ---- keys and dtypes that transformers treats specially --------------------------------------------------------------


def expected_anyway(model: nn.Module, keys: Iterable[str], kind: str) -> list[str]:
    """Return the keys without those that a model of transformers allows to be of this kind: missing or unexpected."""
    patterns = list(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "unexpected" and _of_transformers(model):
        buffers = [name for name, _ in model.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            patterns.append(r"rotary_emb\.inv_freq")  # of each layer, in old checkpoints
        if any(name.endswith("position_ids") for name in buffers):
            patterns.append(r"(^|\.)position_ids$")
    return [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]


def kept_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes, by key, of parameters that a model of transformers does not cast to `dtype`."""
    loading = _loading() if _of_transformers(model) else None
    if loading is None or not hasattr(model, "_get_dtype_plan"):
        return {}
    plan = cast("PreTrainedModel", model)._get_dtype_plan(dtype)
    if not plan:
        return {}
    alternatives, group_names, _ = loading.build_glob_alternation(list(plan))
    found = {key: alternatives.search(key) for key, _ in model.named_parameters()}
    return {key: plan[group_names[match.lastgroup]] for key, match in found.items() if match is not None}
