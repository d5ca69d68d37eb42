"""parallelize_module: parallelize the modules that a plan names, each with its style.

>>> parallelize_module(model, mesh["tp"], {"layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": "rowwise"})
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError, ShardwiseError
from ..nn.parameters import distribute_parameter, keep_ties, own_tensors
from ..sharding.mesh import current_mesh
from ..sharding.placement import Partial
from .axis import StyleAxis
from .base import ParallelStyle
from .heads import AttentionHeads
from .local_parameters import LocalParameters, ToLocal
from .names import NamedStyle

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
    wildcards (`*`, `?`, `[0-3]`), and "" is the module itself. A style may be given by its name on model hubs; such an
    entry may also name parameters: `{"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}`.

    On a mesh of several axes styles act on the axis named "tp"; over the others, parameters are replicated and inputs
    keep their placements. `src_data_rank` is the rank whose values the parameters take, as in `distribute_tensor`.

    >>> model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": "rowwise"})
    >>> model[0].weight.spec, model[2].weight.spec
    (f32[8@tp, 4], f32[4, 8@tp])
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    if parallelize_plan is None:
        warnings.warn("parallelize_module got no plan and does nothing", stacklevel=2)
        return module
    entries = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    styles = {pattern: _as_style(style, pattern) for pattern, style in entries.items()}
    modules = {pattern: list(_matches(module, pattern)) for pattern in styles}
    returned = module
    with keep_ties(module) as ties:
        # Parameters first: the style of a module may depend on how those that it owns are sharded.
        owners = OwnedParameters(mesh, src_data_rank)
        for pattern, style in styles.items():
            parameters = list(_parameters(module, pattern)) if isinstance(style, NamedStyle) else []
            if not modules[pattern] and not parameters:
                warnings.warn(_no_match(module, pattern), stacklevel=2)
            for path, owner in parameters if not modules[pattern] else []:
                with _named("parameter", path):
                    owners.shard(owner, path.rpartition(".")[2], style)  # type: ignore[arg-type]
        heads = AttentionHeads()
        for pattern, style in styles.items():
            for path, target in modules[pattern]:
                with _named("module", path):
                    applied = _apply(_of_module(style, module, path, target, mesh, heads), target, mesh, src_data_rank)
                if target is module:
                    returned = applied
        owners.use_local_shards(except_for=[target for found in modules.values() for _, target in found])
        ties.restore()  # a style of the user's own may have replaced a parameter in one of its owners alone
    return returned


def _as_style(style: object, pattern: str) -> ParallelStyle:
    if isinstance(style, str):
        return NamedStyle(style)
    if not isinstance(style, ParallelStyle):
        kind = f"{type(style).__module__}.{type(style).__name__}"
        theirs = kind.startswith("torch.distributed")
        fix = "import the styles from shardwise.parallel" if theirs else "give a ParallelStyle, or the name of one"
        raise InputError(f"the plan for {pattern!r} is {style!r}, a {kind} and not a style of shardwise", fix)
    return style


def _of_module(
    style: ParallelStyle, root: nn.Module, path: str, module: nn.Module, mesh: DeviceMesh, heads: AttentionHeads
) -> ParallelStyle:
    """Return the style for a module. That of a name may depend on the module around it."""
    if not isinstance(style, NamedStyle):
        return style
    above, _, name = path.rpartition(".")
    parent = root.get_submodule(above) if path else None
    found = style.for_module(parent)
    if parent is not None and style.use_local_output and style.name == "colwise":
        axis = StyleAxis(mesh, style.axis)
        repeated = heads.style_for(module, parent, name, axis.size)
        if repeated is not None:
            repeated.axis = style.axis
            return repeated
    return found


def _apply(style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    style.src_data_rank = src_data_rank
    return style._apply(module, mesh)


@contextmanager
def _named(kind: str, path: str) -> Iterator[None]:
    """Add the module or parameter to the text of errors that are raised inside."""
    try:
        yield
    except ShardwiseError as error:
        raise type(error)(f"{kind} {path!r}: {error.problem}", error.fix) from error


class OwnedParameters:
    """Shards parameters that a plan names, and makes the modules that own them run on local shards."""

    def __init__(self, mesh: DeviceMesh, src_data_rank: int | None) -> None:
        self.mesh, self.src_data_rank = mesh, src_data_rank
        self.local: dict[nn.Module, dict[str, ToLocal]] = {}

    def shard(self, owner: nn.Module, name: str, style: NamedStyle) -> None:
        """Distribute a parameter as its style says."""
        axis = StyleAxis(self.mesh, style.axis)
        placement = style.for_parameter(own_tensors(owner)[name].dim())
        distribute_parameter(owner, name, self.mesh, axis.parameter_placements(placement), self.src_data_rank)
        if style.use_local_output:
            grad = Partial() if style.name == "replicated_with_grad_allreduce" else None
            self.local.setdefault(owner, {})[name] = lambda parameter: axis.to_local(parameter, grad)

    def use_local_shards(self, except_for: list[nn.Module]) -> None:
        """Make the owners run on local shards, except those with a style of their own."""
        for owner, parameters in self.local.items():
            if not any(owner is module for module in except_for):
                LocalParameters(parameters).register(owner)


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


def _parameters(root: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths of parameters that match a path with wildcards, each with the module that owns it."""
    above, _, last = pattern.rpartition(".")
    for path, module in _matches(root, above) if pattern else ():
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            if fnmatch(name, last):
                yield (f"{path}.{name}" if path else name), module


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
        has = f"; {', '.join(own)} is a parameter, and this style applies to modules" if own else ""
        return (
            f"the plan's {pattern!r} matches no module: {where} there is no {parts[depth - 1]!r} "
            f"among {', '.join(names) or 'nothing'}{has}; the entry is skipped"
        )
    return f"the plan's {pattern!r} matches no module"
