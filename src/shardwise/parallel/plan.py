"""parallelize_module: parallelize the modules that a plan names, each with its style.

>>> parallelize_module(model, mesh["tp"], {"layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": "rowwise"})
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError, ShardwiseError
from ..nn.parameters import keep_ties
from ..sharding.mesh import current_mesh
from .base import ParallelStyle
from .names import named_style

Style = ParallelStyle | str


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Style | dict[str, Style] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize a module, or those of its submodules that a plan names.

    A plan is a style for the module itself, or a dict from paths to styles. Each component of a path may contain
    wildcards (`*`, `?`, `[0-3]`), and "" is the module itself. A style may be given by its name on model hubs.

    On a mesh of several axes styles act on the axis named "tp"; over the others, parameters are replicated and inputs
    keep their placements. `src_data_rank` is the rank whose values the parameters take, as in `distribute_tensor`.
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    if parallelize_plan is None:
        warnings.warn("parallelize_module got no plan and does nothing", stacklevel=2)
        return module
    entries = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    with keep_ties(module):
        for pattern, style in entries.items():
            found = list(_matches(module, pattern))
            if not found:
                warnings.warn(_no_match(module, pattern), stacklevel=2)
            for path, target in found:
                _apply(_as_style(style, pattern), path, target, mesh, src_data_rank)
    return module


def _as_style(style: object, pattern: str) -> ParallelStyle:
    if isinstance(style, str):
        return named_style(style)
    if not isinstance(style, ParallelStyle):
        kind = f"{type(style).__module__}.{type(style).__name__}"
        theirs = kind.startswith("torch.distributed")
        fix = "import the styles from shardwise.parallel" if theirs else "give a ParallelStyle, or the name of one"
        raise InputError(f"the plan for {pattern!r} is {style!r}, a {kind} and not a style of shardwise", fix)
    return style


def _apply(style: ParallelStyle, path: str, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    style.src_data_rank = src_data_rank
    try:
        style._apply(module, mesh)
    except ShardwiseError as error:
        raise type(error)(f"module {path!r}: {error.problem}", error.fix) from error


def _matches(root: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that match a path with wildcards, each with its own path."""
    found = [("", root)]
    for part in pattern.split(".") if pattern else []:
        found = [
            (f"{path}.{name}" if path else name, child)
            for path, module in found
            for name, child in module.named_children()
            if fnmatch(name, part)
        ]
    yield from found


def _no_match(root: nn.Module, pattern: str) -> str:
    """Return a warning that names the first component of a path without a match, and the names that exist there."""
    parts = pattern.split(".")
    for depth in range(1, len(parts) + 1):
        parents = list(_matches(root, ".".join(parts[: depth - 1])))
        if any(True for _ in _matches(root, ".".join(parts[:depth]))):
            continue
        names = sorted({name for _, module in parents for name, _ in module.named_children()})
        parameters = {name for _, module in parents for name, _ in module.named_parameters(recurse=False)}
        own = sorted(name for name in parameters if fnmatch(name, parts[depth - 1]))
        where = f"in {parents[0][0]!r}" if parents[0][0] else f"in the {type(root).__name__}"
        has = f"; {', '.join(own)} is a parameter, and styles apply to modules" if own else ""
        return (
            f"the plan's {pattern!r} matches no module: {where} there is no {parts[depth - 1]!r} "
            f"among {', '.join(names) or 'nothing'}{has}; the entry is skipped"
        )
    return f"the plan's {pattern!r} matches no module"
