"""Run a step, and record what it communicates, when, and the modules that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from ...sharding.mesh import MeshInfo
from ...sharding.runtime import runtime_of_world
from ..explaining.explain import BYTES_PER_SECOND, FLOPS_PER_SECOND
from ..explaining.recorder import Recorder
from ..explaining.records import Communication
from ..explaining.timeline import Span


@dataclass
class Step:
    """A step that has run: its communication, the spans of its timeline, and its tensors by name."""

    communications: Sequence[Communication] = ()
    spans: Sequence[Span] = ()
    modelled: bool = True
    """Whether the times of spans are modelled, as those of simulated ranks are; else they are measured on this rank."""
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    result: object = None
    meshes: Sequence[MeshInfo] = ()
    """The meshes over which something was communicated, if their world has not ended."""


def run_step(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Step:
    """Run a function, and return what it communicated; the parameters are those of the modules that it called."""
    recorder = Recorder()
    with recorder.recording():
        result = function(*args, **kwargs)
    modules = recorder.calls.modules
    roots = {name: module for name, module in modules.items() if not _is_part(name, modules)}
    found = describe(roots)
    spans = recorder.timeline.spans(FLOPS_PER_SECOND, BYTES_PER_SECOND)
    simulated = recorder.timeline.simulated
    meshes = _meshes(set(recorder.mesh_axes))
    return Step(recorder.communications, spans, simulated, found.parameters, found.buffers, result, meshes)


def _meshes(axes: set[str]) -> list[MeshInfo]:
    """Return the adopted meshes of the running world that have some of these axes."""
    known = runtime_of_world().meshes.values() if dist.is_initialized() else ()
    return [info for info in known if info.adopted and axes & set(info.names)]


def describe(roots: Mapping[str, nn.Module]) -> Step:
    """Return a step with the parameters and buffers of these modules, prefixed by the module if there are several."""
    step: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for root, module in roots.items():
        prefix = f"{root}." if len(roots) > 1 else ""
        for tensors, named in zip(step, (module.named_parameters(), module.named_buffers()), strict=True):
            tensors.update({f"{prefix}{name}": tensor for name, tensor in named})
    return Step(parameters=step[0], buffers=step[1])


def _is_part(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module is a submodule of another one in `modules`."""
    while name := name.rpartition(".")[0]:
        if name in modules:
            return True
    return False
